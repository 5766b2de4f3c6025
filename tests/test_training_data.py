"""Training data: records, text, conversations made by the target, batches, configuration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.training.batches import BatchSource
from angelspec_backend.training.config import TrainConfigError, dump_config, load_config, make_config
from angelspec_backend.training.conversation import (
    ChatFormat,
    ConversationSettings,
    Turn,
    normalized,
    regenerated,
    sampled,
)
from angelspec_backend.training.corpus import Corpus, CorpusFiles, Document, load_corpus
from angelspec_backend.training.generate import (
    ConversationFile,
    ConversationMaker,
    GenerationError,
    describe_settings,
)
from angelspec_backend.training.openers import OPENERS
from angelspec_backend.training.records import RecordError, read_conversations, read_messages
from angelspec_backend.training.text import Collector, html_text
from angelspec_backend.training.vocab import count_tokens, coverage, frequent_tokens, mask_token
from families import tiny_model

SETTINGS = ConversationSettings(max_tokens=12, max_user_tokens=6, max_length=200, follow_up=0.5)


def test_messages_are_read_in_every_form():
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert read_messages({"prompt": "Hi"}, "") == expected[:1]
    assert read_messages({"messages": expected}, "") == expected
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert read_messages({"conversations": shared}, "") == expected
    with pytest.raises(RecordError, match=r'data:3 must have "prompt"'):
        read_messages({"text": "Hi"}, "data:3")


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi"}\n{"pro')
    with pytest.raises(RecordError, match=r"a\.jsonl:2 is not JSON"):
        read_conversations(tmp_path / "a.jsonl")


def test_html_becomes_readable_text():
    page = "<head><title>x</title></head><p>One\n two</p><script>no()</script><pre>a\n  b</pre><li>c</li>"
    assert html_text(page).split("\n") == ["", "", "One two", "", "", "", "a", "  b", "", "", "c", ""]


def test_text_is_cut_between_paragraphs_and_comes_once():
    paragraphs = [f"Paragraph number {word} says something that is long enough." for word in "abcdefgh"]
    collector = Collector(150, min_characters=50)
    documents = list(collector.documents("\n\n".join(paragraphs)))
    assert "\n\n".join(documents).split("\n\n") == paragraphs
    assert max(map(len, documents)) <= 150
    long = " ".join(paragraphs[:2])
    assert list(collector.documents(long)) == [long]
    assert list(collector.documents(long)) == []


def test_text_that_holds_an_excluded_prompt_is_dropped():
    prompt = "How many eggs does a farmer with three hens have after a week of seven days, if each lays one?"
    collector = Collector(4000, min_characters=10, excluded=[prompt])
    assert list(collector.documents(f"Exercise. {prompt.upper()} Solution: 21.")) == []
    assert len(list(collector.documents("Exercise. How many eggs does a hen lay in a week?"))) == 1


def test_there_are_many_openers_of_every_task():
    assert sum(map(len, OPENERS.values())) >= 150
    assert all(len(set(openers)) == len(openers) >= 10 for openers in OPENERS.values())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    from transformers import AutoTokenizer

    from test_training_run import save_tokenizer

    folder = tmp_path_factory.mktemp("target")
    save_tokenizer(folder)
    model = tiny_model("llama", torch.float32, max_position_embeddings=256)
    runner = ModelRunner(model, num_blocks=80, block_size=16)
    return runner, ChatFormat(AutoTokenizer.from_pretrained(folder), runner.eos_token_ids)


def make(target, path: Path, total: int, start=None, settings=SETTINGS) -> list[bytes]:
    runner, chat = target
    out = ConversationFile(path, describe_settings("tiny", settings, "openers"))
    ConversationMaker(
        runner, out, start or (lambda index: sampled(index, chat, settings)), total, 200, num_rows=4
    ).run()
    return path.read_bytes().splitlines()


def test_conversations_are_the_same_whenever_the_maker_was_stopped(target, tmp_path):
    whole = make(target, tmp_path / "whole.jsonl", 12)
    make(target, tmp_path / "parts.jsonl", 5)
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"index": 5, "mess')  # killed while writing
    assert make(target, tmp_path / "parts.jsonl", 12) == whole
    records = [json.loads(line) for line in whole]
    assert [record["index"] for record in records if record] == [i for i, r in enumerate(records) if r]
    assert {bool(record["temperature"]) for record in records if record} == {False, True}


def test_a_file_is_not_continued_with_other_settings(target, tmp_path):
    make(target, tmp_path / "a.jsonl", 2)
    other = ConversationSettings(seed=7)
    with pytest.raises(GenerationError, match="was made with seed 0, not 7"):
        ConversationFile(tmp_path / "a.jsonl", describe_settings("tiny", other, "openers"))


def test_answers_to_given_prompts_are_what_the_target_says_to_the_template(target, tmp_path):
    _, chat = target
    prompts = ["w5 w9 w17", "w30 w31", "w101 w7 w8 w9", "w12"]

    def start(index: int):
        given = [{"role": "user", "content": prompts[index]}, {"role": "assistant", "content": "w3"}]
        return regenerated(index, chat, SETTINGS, given)

    model = tiny_model("llama", torch.float32, max_position_embeddings=256)
    for line in make(target, tmp_path / "a.jsonl", 4, start):
        record = json.loads(line)
        [[first, end]] = record["assistant_spans"]
        ids, [question, answer] = record["token_ids"], record["messages"]
        assert question["content"] == prompts[record["index"]]
        assert ids[:first] == chat.encode(chat.render([question]))
        assert answer["content"] == chat.decode(ids[first:])
        assert end == len(ids) <= first + 12
        if record["temperature"] == 0:
            given = torch.tensor([ids[:first]])
            greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2}
            assert ids == model.generate(given, attention_mask=torch.ones_like(given), **greedy)[0].tolist()


def test_a_conversation_that_asks_an_excluded_prompt_is_dropped(target):
    _, chat = target
    asked = Turn([5, 9, 17], True)
    openers = {opener for group in OPENERS.values() for opener in group}
    excluded = frozenset(normalized(opener + chat.decode(asked.token_ids)) for opener in openers)
    allowed, banned = sampled(0, chat, SETTINGS), sampled(0, chat, SETTINGS, excluded)
    next(allowed), next(banned)
    assert allowed.send(asked).sampling.temperature == 0
    with pytest.raises(StopIteration) as end:
        banned.send(asked)
    assert end.value.value is None


def corpus(lengths: list[int]) -> Corpus:
    return Corpus(
        [Document(np.full(n, i, np.int32), np.ones(n, bool), "text") for i, n in enumerate(lengths)]
    )


def test_every_document_comes_once_an_epoch_and_rows_are_shared_out():
    lengths = [3 + (7 * i) % 40 for i in range(60)]
    one = BatchSource(corpus(lengths), 64, 4, seed=3)
    two = [BatchSource(corpus(lengths), 64, 4, 3, rank, 2) for rank in range(2)]
    seen: list[int] = []
    for step in range(one.steps_per_epoch):
        rows = one.rows_of(step)
        assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
        shared = [source.rows_of(step) for source in two]
        assert [shared[0][0], shared[1][0], shared[0][1], shared[1][1]] == rows
        assert [*one.row_seeds(step)[::2], *one.row_seeds(step)[1::2]] == [
            seed for source in two for seed in source.row_seeds(step)
        ]
        seen += [index for row in rows for index in row]
    assert len(set(seen)) == len(seen) >= 54  # what fills no whole step is left out
    assert one.epoch_of(one.steps_per_epoch) == 1
    assert one.rows_of(one.steps_per_epoch) != one.rows_of(0)


def test_a_batch_knows_documents_and_positions():
    batch = BatchSource(corpus([5, 4, 3, 6]), 10, 2, seed=0).batch(0)
    rows = batch.rows(batch.token_ids, -1)
    assert rows.shape[0] == 2
    assert (rows >= 0).sum() == len(batch.token_ids)
    for document, index in enumerate(batch.documents):
        own = batch.document_ids == document
        assert batch.token_ids[own].tolist() == [index] * int(own.sum())
        assert batch.positions[own].tolist() == list(range(int(own.sum())))


def test_held_out_documents_stay_held_out_when_others_come(target, tmp_path):
    _, chat = target
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"token_ids": rng.integers(3, 199, 30).tolist(), "assistant_spans": [[10, 30]]})
        for _ in range(80)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "null"]) + "\n")
    files = CorpusFiles([tmp_path / "a.jsonl"], [], {})
    train, held = load_corpus(files, chat, 25, 0.2)
    assert len(train.documents) + len(held.documents) == 80
    assert 5 < len(held.documents) < 30
    assert {len(document) for document in train.documents} == {25}
    first = CorpusFiles([tmp_path / "a.jsonl"], [], {str(tmp_path / "a.jsonl"): 40})
    fewer = {document.token_ids.tobytes() for document in load_corpus(first, chat, 25, 0.2)[1].documents}
    assert fewer <= {document.token_ids.tobytes() for document in held.documents}


def test_the_draft_vocabulary_holds_the_most_frequent_tokens():
    ids = np.repeat(np.arange(6, dtype=np.int32), [0, 5, 1, 9, 5, 0])
    text = np.array([5] * 7 + [2], np.int32)  # counts a quarter
    documents = [Document(ids, ids >= 0, "greedy"), Document(text, text >= 0, "text")]
    data = Corpus(documents)
    counts = count_tokens(data, 6)
    assert counts.tolist() == [0, 5, 2, 9, 5, 7]
    vocab = frequent_tokens(data, 6, 3)
    assert vocab.target_ids.tolist() == [1, 3, 4]
    assert coverage(counts, vocab) == 19 / 28
    assert frequent_tokens(data, 6, 0) is None
    assert mask_token(counts, frozenset({0})) == 2


def test_wrong_configurations_are_refused_with_what_would_be_right(tmp_path):
    for values, message in (
        (
            {"drafter": {"num_layer": 2}},
            r"unknown key drafter\.num_layer; did you mean drafter\.num_layers\?",
        ),
        ({"objective": {"lk_weigth": 1}}, r"did you mean objective\.lk_weight\?"),
        ({"optimiser": {}}, "did you mean optimizer"),
        ({"drafter": {"kind": "dfly2"}}, r"drafter\.kind is 'dfly2': .*'dflash'"),
        ({"run": {"steps": -1}}, r"run\.steps is -1"),
        ({"objective": {"lk_weight": 2}}, "lk_weight must be between 0 and 1"),
    ):
        with pytest.raises(TrainConfigError, match=message):
            make_config(values)
    with pytest.raises(TrainConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("run: {seed: 3}")
    with pytest.raises(TrainConfigError, match="is written key=value"):
        load_config(tmp_path / "a.yaml", ["run.seed"])
    found = load_config(tmp_path / "a.yaml", ["drafter.tap_ids=[1, 2]", "schedule.lr=0.1"])
    assert (found.run.seed, found.drafter.tap_ids, found.schedule.lr) == (3, (1, 2), 0.1)
    (tmp_path / "b.yaml").write_text(dump_config(found))
    assert load_config(tmp_path / "b.yaml") == found
