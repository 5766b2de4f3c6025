"""Prompts by task: every form of a line, equal shares, errors with their place, public sets from a hub."""

import http.server
import json
import threading
from collections import Counter

import pytest

from loadtest import hub_sets
from loadtest.task_sets import DEFAULT_PROMPTS, Prompt, PromptError, fits, load_prompts, read_prompt

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def write(folder, name, *records):
    """A JSONL file of records, and a blank line."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return file


def read(record):
    return read_prompt(json.dumps(record), "x.jsonl:1", "x")


def first_words(prompts):
    return [prompt.messages[0]["content"] for prompt in prompts]


# Forms


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "a", "answer": "b"}, [USER]),
        ({"turns": ["a", "c"], "question_id": 81}, [USER]),
        ({"messages": [USER]}, [USER]),
        ({"messages": [USER, ANSWER]}, [USER]),
        ({"messages": [USER, ANSWER, {**USER, "id": 3}, ANSWER]}, [USER, ANSWER, USER]),
        (
            {"messages": [{"role": "system", "content": "s"}, USER]},
            [{"role": "system", "content": "s"}, USER],
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2},
            [USER, ANSWER, USER],
        ),
    ],
)
def test_a_line_is_a_prompt_up_to_the_last_message_of_the_user(record, messages):
    assert read(record) == Prompt("x", messages)


def test_a_line_may_name_its_task():
    assert read({"prompt": "a", "task": "maths"}).task == "maths"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([], "must be a JSON object"),
        ({"text": "a", "id": 1}, "it has text, id"),
        ({}, "it has nothing"),
        ({"prompt": 1}, "must have"),
        ({"turns": []}, "must have"),
        ({"messages": [ANSWER]}, "no message of the user"),
        ({"messages": [USER, {"role": "robot", "content": "a"}]}, 'message 1 must have "role"'),
        ({"messages": [{"role": "user", "content": None}]}, '"content", a text'),
        ({"messages": ["a"]}, "message 0 must have"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "message 0 must have"),
        ({"conversations": [USER]}, '"from", one of'),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_place(record, problem):
    with pytest.raises(PromptError, match=problem) as error:
        read(record)
    assert str(error.value).startswith("x.jsonl:1")


def test_errors_name_the_file_and_the_line(tmp_path):
    file = write(tmp_path, "x", {"prompt": "a"})
    file.write_text(file.read_text() + "nonsense\n")
    with pytest.raises(PromptError, match=r"x\.jsonl:3 is not JSON"):
        load_prompts(tmp_path)
    with pytest.raises(PromptError, match=r"x\.jsonl holds no prompts"):
        load_prompts(write(tmp_path, "x"))
    with pytest.raises(PromptError, match=r"cannot read .*absent.*gsm8k"):
        load_prompts(tmp_path / "absent.jsonl")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match="not UTF-8"):
        load_prompts(file)
    file.unlink()
    with pytest.raises(PromptError, match=r"no \*\.jsonl files"):
        load_prompts(tmp_path)


def test_a_line_ends_at_a_newline_only(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}', encoding="utf-8")
    assert sorted(first_words(load_prompts(file))) == ["a\u2028b", "c"]


# Shares


def test_tasks_take_turns_in_an_order_that_the_seed_fixes(tmp_path):
    for name, count in (("a", 50), ("b", 30)):
        write(tmp_path, name, *({"prompt": f"{name}{index}"} for index in range(count)))
    prompts = load_prompts(tmp_path)
    assert [prompt.task for prompt in prompts] == ["a", "b"] * 30
    assert [text[0] for text in first_words(prompts)] == ["a", "b"] * 30
    assert len(set(first_words(prompts))) == 60
    assert prompts == load_prompts(tmp_path)
    assert prompts == load_prompts(str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl")
    assert prompts != load_prompts(tmp_path, seed=1)


def test_tasks_of_one_file_have_equal_shares_too(tmp_path):
    records = [{"prompt": str(index), "task": "ab"[index % 3 == 0]} for index in range(9)]
    prompts = load_prompts(write(tmp_path, "all", *records))
    assert Counter(prompt.task for prompt in prompts) == {"a": 3, "b": 3}


def test_prompts_that_are_too_long_do_not_count(tmp_path):
    files = [
        write(tmp_path, "b", {"prompt": "b"}),
        write(tmp_path, "a", *({"prompt": t} for t in ("a", "aa", "aaa"))),
    ]

    def keep(prompt):
        return len(prompt.messages[0]["content"]) < 2

    assert first_words(load_prompts(*files, keep=keep)) == ["b", "a"]
    with pytest.raises(PromptError, match="'a' holds no prompts that are short enough"):
        load_prompts(files[1], keep=lambda prompt: False)


def test_the_length_of_a_prompt_is_in_tokens(target_dir, tmp_path):
    short = fits(target_dir, 3)
    assert short(Prompt("x", [{"role": "user", "content": "one two three"}]))
    assert not short(Prompt("x", [{"role": "user", "content": "one two three four"}]))
    with pytest.raises(PromptError, match=r"no tokenizer\.json"):
        fits(tmp_path, 3)


def test_own_prompts_are_of_six_tasks_in_equal_shares_and_fit_a_small_context(target_dir):
    prompts = load_prompts(DEFAULT_PROMPTS, keep=fits(target_dir, 860))
    assert Counter(prompt.task for prompt in prompts) == dict.fromkeys(
        ["chat", "chinese", "code", "long_text", "maths", "multi_turn"], 10
    )
    assert len({json.dumps(prompt.messages) for prompt in prompts}) == 60
    assert all(len(prompt.messages) >= 3 for prompt in prompts if prompt.task == "multi_turn")


# Public sets

ROWS = {
    "gsm8k": {"question": "How many?", "answer": "3"},
    "math500": {"problem": "Add 1 and {2}."},
    "humaneval": {"prompt": "def f():\n"},
    "mbpp": {"text": "Write f.", "test_list": ["assert f(1)", "assert f(2)", "assert f(3)"]},
    "livecodebench": {"question_title": "T", "question_content": "Sort it.", "starter_code": ""},
    "mtbench": {"prompt": ["Write a poem.", "And another."]},
}
WANTED = {
    "gsm8k": "How many?",
    "math500": "Add 1 and {2}.",
    "humaneval": "def f():\n",
    "mbpp": "assert f(3)",
    "livecodebench": "T\n\nSort it.",
    "mtbench": "Write a poem.",
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine that serves files under their paths; without files it answers 404."""
    files: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            body = files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            if body is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"1"')
            self.end_headers()
            return body

        def do_GET(self):
            self.wfile.write(self.do_HEAD() or b"")

        def log_message(self, *args):
            pass

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        yield files
        server.shutdown()


def as_file(name, row, tmp_path):
    """The bytes of a file of one record."""
    if not name.endswith(".parquet"):
        return json.dumps(row).encode() + b"\n"
    file = tmp_path / "rows.parquet"
    pytest.importorskip("polars").DataFrame([row]).write_parquet(file)
    return file.read_bytes()


@pytest.mark.parametrize("task", list(ROWS))
def test_a_public_set_is_downloaded_by_its_name_or_its_repository(hub, tmp_path, task):
    each = hub_sets.HUB_SETS[task]
    hub[f"/datasets/{each.repo}/resolve/main/{each.file}"] = as_file(each.file, ROWS[task], tmp_path)
    (prompt,) = load_prompts(task)
    assert prompt.task == task
    assert WANTED[task] in prompt.messages[0]["content"]
    assert load_prompts(each.repo) == [prompt]


def test_records_that_changed_are_reported(hub):
    each = hub_sets.HUB_SETS["math500"]
    hub[f"/datasets/{each.repo}/resolve/main/{each.file}"] = b'{"question": "a"}\n'
    with pytest.raises(PromptError, match=r"records of HuggingFaceH4/MATH-500 .*'problem'"):
        load_prompts("math500")


def test_a_set_that_is_not_there_is_reported(hub):
    with pytest.raises(PromptError, match=r"cannot download test\.jsonl of HuggingFaceH4/MATH-500"):
        load_prompts("math500")


def test_without_the_network_the_error_says_what_helps(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PromptError, match=r"'gsm8k' .* out of reach.* path of a JSONL file"):
        load_prompts("gsm8k")


def test_a_file_of_a_sets_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "gsm8k", {"prompt": "own"}).rename("gsm8k")
    assert first_words(load_prompts("gsm8k")) == ["own"]
