"""evaluate_drafter: its figures, its checks and its messages, with small random models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import evaluate_drafter
from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.drafters.checkpoint import export_drafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.target import TargetEngine
from evaluation_figures import acceptance, cost, same_perplexity, warning
from evaluation_measure import Answer, Round, StepTime
from evaluation_models import LoadedDrafter, load_drafter, load_target, load_tasks, read_choice
from evaluation_options import parse_arguments
from evaluation_report import Result
from evaluation_serving import EvaluationError, _loop_config, make_requests, serve
from families import tiny_model
from loadtest.task_sets import PromptError
from random_drafters import random_drafter

VOCAB = 23  # so few that random drafters are right now and then
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s>{% endfor %}"
ROWS, MAX_TOKENS = 4, 20


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More only wait for each other with models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random target with its tokenizer, random drafters for it, and two tasks."""
    root = tmp_path_factory.mktemp("evaluation")
    model = tiny_model("llama", torch.float32, vocab_size=VOCAB)
    model.save_pretrained(root / "target")
    save_tokenizer(root / "target")
    for kind in ("dfly", "mtp"):
        export_drafter(random_drafter(kind, TargetParts.from_model(model)), root / kind)
    generator = torch.Generator().manual_seed(3)
    for task, count in (("even", 9), ("odd", 5)):
        ids = torch.randint(3, VOCAB, (count, 6), generator=generator).tolist()
        lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) for row in ids]
        (root / "tasks").mkdir(exist_ok=True)
        (root / "tasks" / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def save_tokenizer(folder: Path) -> None:
    """One token per word w3 ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def runner(folder):
    return load_target(str(folder / "target"), torch.float32, "cpu", ROWS, 100)


@pytest.fixture(scope="module")
def prompts(folder):
    tasks = load_tasks([str(folder / "tasks")], str(folder / "target"), 3, 0, MAX_TOKENS)
    return [prompt for prompts in tasks.values() for prompt in prompts]


@pytest.fixture(scope="module")
def plain(runner, prompts):
    """Answers of plain decoding, by temperature."""
    return {t: serve(runner, make_requests(prompts, t, 5, MAX_TOKENS), ROWS).answers for t in (0.0, 1.0)}


def loaded(folder, runner, name: str, num_draft_tokens: int | None = None) -> LoadedDrafter:
    path = {"ngram": "", "draft_model": f"={folder}/target"}.get(name, f"={folder}/{name}")
    return load_drafter(read_choice(name + path), str(folder / "target"), runner, ROWS, num_draft_tokens)


def drafted(requests, drafter: LoadedDrafter):
    return [replace(each, drafter=0, num_draft_tokens=drafter.num_draft_tokens) for each in requests]


def events_of(runner, requests, drafter) -> list[list[int]]:
    """Numbers of tokens that came at a time, for each request, from a loop that nobody measures."""
    sizes: list[list[int]] = [[] for _ in requests]
    executor = LocalExecutor(TargetEngine(runner), DrafterHost([drafter], ROWS))
    config = _loop_config(runner, requests, ROWS, drafter, False)
    loop = SpeculativeLoop(executor, config, lambda e: sizes[e.request_id].append(len(e.token_ids)))
    for index, request in enumerate(requests):
        loop.submit(index, request)
    while loop.num_live:
        loop._receive()
        loop.step()
    return sizes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ngram", "dfly", "mtp", "draft_model"])
def test_figures_are_those_counted_from_the_stream_and_the_text_is_that_of_plain_decoding(
    folder, runner, prompts, plain, name, temperature
):
    drafter = loaded(folder, runner, name)
    requests = make_requests(prompts, temperature, 5, MAX_TOKENS)
    served = serve(runner, drafted(requests, drafter), ROWS, drafter.drafter)
    found, reference = acceptance(served.answers), acceptance(plain[temperature])
    assert [a.token_ids for a in served.answers] == [a.token_ids for a in plain[temperature]]
    assert same_perplexity(found, reference, exact=True)
    assert reference.acceptance_length == 1
    assert reference.first_acceptance is None

    k = drafter.num_draft_tokens
    survived, asked, steps, tokens = [0] * k, [0] * k, 0, 0
    for sizes in events_of(runner, drafted(requests, drafter), drafter.drafter):
        done = sizes[0]
        for size in sizes[1:]:
            wanted = min(k, MAX_TOKENS - done - 1)
            for place in range(wanted):
                asked[place] += 1
                survived[place] += size - 1 > place
            steps, tokens, done = steps + 1, tokens + size, done + size
    assert found.verify_steps == steps
    assert found.accepted_draft_tokens > 0 or name == "ngram"
    assert found.accepted_draft_tokens == tokens - steps
    assert found.acceptance_length == pytest.approx(tokens / steps)
    assert found.acceptance_by_position == [hit / tried for hit, tried in zip(survived, asked, strict=True)]


def test_answers_that_end_themselves_are_cut_at_their_end(folder, runner, prompts):
    """Drafts behind the end of a text are in no figure."""
    drafter = loaded(folder, runner, "draft_model")
    served = serve(
        runner, drafted(make_requests(prompts, 1.0, 1, MAX_TOKENS), drafter), ROWS, drafter.drafter
    )
    ended = [answer for answer in served.answers if answer.token_ids[-1] == 2]
    assert ended
    for answer in served.answers:
        assert len(answer.token_ids) == 1 + sum(1 + each.accepted for each in answer.rounds)


def test_the_target_drafting_for_itself_is_always_right(folder, runner, prompts):
    drafter = loaded(folder, runner, "draft_model", 3)
    requests = [replace(each, ignore_eos=True) for each in make_requests(prompts, 1.0, 2, MAX_TOKENS)]
    served = serve(runner, drafted(requests, drafter), ROWS, drafter.drafter)
    found = acceptance(served.answers)
    assert found.acceptance_by_position == [1.0, 1.0, 1.0]
    assert found.first_acceptance == 1
    spent = cost(served.times)
    assert spent is not None
    assert spent.num_rows == ROWS
    assert spent.draft_ms > 0


def test_perplexity_is_that_of_the_model_over_the_whole_text(prompts, plain):
    model = tiny_model("llama", torch.float32, vocab_size=VOCAB)
    total, count = 0.0, 0
    for prompt, answer in zip(prompts, plain[1.0], strict=True):
        ids = torch.tensor([*prompt, *answer.token_ids])
        with torch.no_grad():
            scores = model(ids[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        total += float(scores.gather(1, ids[len(prompt) :, None]).sum())
        count += len(answer.token_ids)
    assert acceptance(plain[1.0]).perplexity == pytest.approx(math.exp(-total / count), rel=1e-4)


def test_survival_by_hand():
    """Steps that wanted fewer drafts say nothing of those behind; steps without a find count as wrong."""
    rounds = [Round(3, 3, 3), Round(3, 3, 1), Round(3, 0, 0), Round(2, 2, 2), Round(0, 0, 0)]
    found = acceptance([Answer([1] * 12, rounds, log_prob=-12 * math.log(4))])
    assert found.acceptance_by_position == [3 / 4, 2 / 4, 1 / 3]
    assert found.first_acceptance == 1
    assert found.acceptance_length == pytest.approx(1 + 6 / 5)
    assert found.perplexity == pytest.approx(4)
    assert acceptance([]).acceptance_length is None


def test_cost_is_of_the_fullest_steps():
    found = cost([StepTime(4, 0.001, 0.01), StepTime(4, 0.003, 0.01), StepTime(1, 1.0, 1.0)])
    assert found is not None
    assert (found.num_rows, found.draft_ms, found.target_ms) == (4, pytest.approx(2), pytest.approx(10))
    assert found.share == pytest.approx(0.2)
    assert cost([]) is None


def test_a_low_first_acceptance_is_warned_of_with_causes(folder, runner):
    spec = loaded(folder, runner, "dfly").spec
    low = acceptance([Answer([1] * 8, [Round(3, 3, 0)] * 3 + [Round(3, 3, 2)])])
    text = warning("dfly", 0.0, low, spec)
    for part in ("25%", "template or mode", "tap convention", "layers 0, 1", "mismatched target"):
        assert part in text
    assert warning("ngram", 0.0, low, None) == ""
    high = acceptance([Answer([1] * 8, [Round(3, 3, 0), Round(3, 3, 1)])])
    assert warning("dfly", 0.0, high, spec) == ""
    nothing = acceptance([Answer([1] * 8, [Round(3, 0, 0)])])
    assert "nothing at all" in warning("dfly", 1.0, nothing, spec)


def test_changed_tokens_and_probabilities_are_noticed():
    plain = Result("ar", 0.0, {"a": [Answer([1, 2])], "b": [Answer([3])]}, None)
    other = Result("x", 0.0, {"a": [Answer([1, 2])], "b": [Answer([4])]}, None)
    assert other.identical(plain) == (1, 2)
    assert other.identical(plain, "a") == (1, 1)
    one, two = (acceptance([Answer([1], log_prob=value)]) for value in (-1.0, -1.001))
    assert not same_perplexity(one, two, exact=True)
    assert same_perplexity(one, two, exact=False)


def test_the_mean_counts_every_task_alike():
    short = [Answer([1] * 5, [Round(3, 3, 3)])]
    long = [Answer([1] * 9, [Round(3, 3, 0)] * 8)]
    assert Result("x", 0.0, {"a": short, "b": long}, None).mean_length == pytest.approx((4 + 1) / 2)


def test_tasks_have_equal_shares_and_the_seed_chooses_them(folder):
    def load(per_set: int, seed: int):
        return load_tasks([str(folder / "tasks")], str(folder / "target"), per_set, seed, MAX_TOKENS)

    assert {task: len(prompts) for task, prompts in load(8, 0).items()} == {"even": 5, "odd": 5}
    assert load(3, 0) == load(3, 0) != load(3, 1)
    assert load(3, 0)["even"] == load(5, 0)["even"][:3]
    with pytest.raises(PromptError, match="'even' holds no prompts that are short enough"):
        load_tasks([str(folder / "tasks")], str(folder / "target"), 3, 0, 250)


def test_draft_lengths_are_those_of_training_or_of_the_option(folder, runner):
    def length(name: str, option: int | None) -> int:
        return loaded(folder, runner, name, option).num_draft_tokens

    assert [length(name, None) for name in ("ngram", "dfly", "mtp")] == [7, 5, 3]
    assert [length(name, 7) for name in ("ngram", "dfly", "mtp")] == [7, 5, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "magic"], "'magic' is no drafter; allowed: ngram, draft_model, dflash"),
        (["--drafters", "dfly"], "'dfly' needs a checkpoint: dfly=FOLDER"),
        (["--drafters", "ngram=x"], "ngram has no checkpoint, got 'x'"),
        (["--drafters", "dfly=a,dfly=b"], "'dfly' is there twice; tell them apart by a note: dfly-b"),
        (["--drafters", "ngram", "--temperatures", "warm"], "numbers from 0 (greedy) to 100"),
        (["--drafters", "ngram", "--temperatures", "-1"], "got '-1'"),
        (["--drafters", "ngram", "--draft-tokens", "0"], "from 1 to 32, got '0'"),
        (["--drafters", "ngram", "--rows", "many"], "from 1 to 1024, got 'many'"),
        ([], "--drafters"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(capsys, options, message):
    with pytest.raises(SystemExit):
        parse_arguments("", options)
    assert message in capsys.readouterr().err


def test_a_failing_drafter_ends_the_evaluation(folder, runner, prompts):
    drafter = loaded(folder, runner, "ngram")

    class Broken:
        info = drafter.drafter.info

        def propose(self, *arrays):
            raise RuntimeError("no")

    requests = drafted(make_requests(prompts, 0.0, 0, MAX_TOKENS), drafter)
    with pytest.raises(EvaluationError, match="drafter 'ngram' failed"):
        serve(runner, requests, ROWS, Broken())


def run(monkeypatch, folder, *options: str) -> None:
    common = [
        "--target",
        str(folder / "target"),
        "--dtype",
        "float32",
        "--max-tokens",
        "12",
        "--per-set",
        "2",
    ]
    monkeypatch.setattr("sys.argv", ["evaluate_drafter.py", *common, *options])
    evaluate_drafter.main()


def test_the_command_writes_a_line_per_drafter_temperature_and_task(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results" / "lines.jsonl"
    names = f"ngram,dfly-a={folder}/dfly,dfly-b={folder}/dfly"
    options = ("--drafters", names, "--prompts", str(folder / "tasks"), "--out", str(out), "--wall", "2")
    run(monkeypatch, folder, *options)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = [(line["temperature"], line["drafter"], line["task"]) for line in lines]
    labels = ("ar", "ngram", "dfly-a", "dfly-b")
    assert found == [(t, label, task) for t in (0.0, 1.0) for label in labels for task in ("even", "odd")]
    for line in lines:
        assert line["identical"] == line["compared"] == line["requests"] == 2
        assert line["acceptance_length"] >= 1
        assert len(line["acceptance_by_position"]) == line["num_draft_tokens"]
        assert line["perplexity"] > 1
        assert line["wall_ms_per_token"] > 0
    shown = capsys.readouterr().out
    assert "mean over tasks" in shown
    assert shown.count("all tokens and perplexities are those of plain decoding") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafters", "dfly={folder}/mtp"), "is a checkpoint of kind 'mtp'"),
        (("--drafters", "dfly={folder}/nowhere"), "nowhere"),
        (("--drafters", "ngram", "--prompts", "{folder}/nowhere.jsonl"), "cannot read"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, monkeypatch, options, message):
    given = [option.format(folder=folder) for option in options]
    if "--prompts" not in given:
        given += ["--prompts", str(folder / "tasks")]
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, folder, *given)
