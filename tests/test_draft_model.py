"""The draft model: it writes what it would write alone, and as its own target it is always right."""

import logging
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER, ROW, DraftOutput, StepInput, split_rows
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.drafters.draft_model import DraftModelDrafter, check_compatible
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from families import COMMON, tiny_model

VOCAB, BLOCK_SIZE, BLOCKS_PER_ROW, NUM_SLOTS = COMMON["vocab_size"], 4, 16, 3
NUM_BLOCKS = 1 + 4 * NUM_SLOTS * BLOCKS_PER_ROW


@cache
def runner(
    purpose: str, dtype: torch.dtype = torch.float32, layers: int = 3, context: int = 0
) -> ModelRunner:
    """A tiny model with a KV pool of its own for each purpose; equal arguments mean equal weights."""
    model = tiny_model("llama", dtype, num_hidden_layers=layers)
    return ModelRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_context=context)


class Drafting:
    """Feeds sequences to a drafter, remembering what each slot holds."""

    def __init__(self, drafter: DraftModelDrafter) -> None:
        self.drafter = drafter

    def step(self, cases: list[dict]) -> list[list[int]]:
        """cases: with slot, num_fed, feed, drafts and sampling parameters.  Returns the drafts of each."""
        rows = np.zeros(len(cases), ROW)
        rows["top_p"], rows["num_blocks"] = 1, BLOCKS_PER_ROW
        for row, case in zip(rows, cases, strict=True):
            row["num_feed"], row["num_draft_tokens"] = len(case["feed"]), case["drafts"]
            for name in case.keys() - {"feed", "drafts"}:
                row[name] = case[name]
        feed = np.concatenate([np.array(case["feed"], np.int32) for case in cases])
        tables = 1 + rows["slot"][:, None] * BLOCKS_PER_ROW + np.arange(BLOCKS_PER_ROW)
        output = self.drafter.propose(rows, feed, tables.ravel().astype(np.int32), np.zeros(0, np.uint8))
        return [draft.tolist() for draft in split_rows(output.token_ids, output.lens)]


def plain_decoding(engine: TargetEngine, tokens: list[int], count: int, **params: float) -> list[int]:
    """What the model writes after the tokens, computed from scratch, one token a step."""
    tokens, start, computed = list(tokens), len(tokens), 0
    for _ in range(count):
        row = np.zeros(1, ROW)
        row["num_computed"], row["num_tokens"], row["sample"] = computed, len(tokens) - computed, 1
        row["num_blocks"], row["top_p"] = BLOCKS_PER_ROW, 1
        for name, value in params.items():
            row[name] = value
        new = np.array(tokens[computed:], np.int32)
        table = np.arange(1, 1 + BLOCKS_PER_ROW, dtype=np.int32)
        computed = len(tokens)
        output = engine.step(StepInput(row, new, np.zeros(0, np.int32), table), DraftOutput.empty(1))
        tokens += output.token_ids.tolist()
    return tokens[start:]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_what_the_model_writes_alone_whatever_was_fed_and_taken_back(seed):
    rng = np.random.default_rng(seed)
    drafting = Drafting(DraftModelDrafter(runner("drafter")))
    alone = TargetEngine(runner("alone"))
    params = [
        {"temperature": t, "seed": rng.integers(2**63), "top_k": k} for t, k in ((0, 0), (1, 0), (0.7, 9))
    ]
    texts: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    held = [0] * NUM_SLOTS
    for _ in range(8):
        cases, expected = [], []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            fed = int(rng.integers(0, held[slot] + 1)) if rng.random() < 0.3 else held[slot]
            feed = rng.integers(3, VOCAB, int(rng.choice([1, 2, 5, 11]))).tolist()
            drafts = int(rng.integers(0, 6))
            if fed + len(feed) + drafts > BLOCKS_PER_ROW * BLOCK_SIZE:
                fed = 0
            text = texts[slot][:fed] + feed
            cases.append({"slot": slot, "num_fed": fed, "feed": feed, "drafts": drafts, **params[slot]})
            written = plain_decoding(alone, text, drafts, **params[slot])
            expected.append(written)
            # Some of the drafts turn out right, and their keys and values are there already.
            right = int(rng.integers(0, max(drafts - 1, 0) + 1))
            texts[slot], held[slot] = text + written[:right], fed + len(feed) + right
        assert drafting.step(cases) == expected


class Served:
    """Requests run to their end through loop, target and drafter in this process."""

    def __init__(self, target: ModelRunner, drafter: ModelRunner) -> None:
        host = DrafterHost([DraftModelDrafter(drafter)], 8)
        config = LoopConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_context=target.max_context,
            eos_token_ids=frozenset(),
            drafters=tuple(each.info for each in host.drafters),
            max_num_seqs=8,
            max_batch_tokens=24,
        )
        self.texts: dict[int, list[int]] = {}
        self.counts: dict[int, tuple[int, int]] = {}
        self.loop = SpeculativeLoop(LocalExecutor(TargetEngine(target), host), config, self.on_event)

    def on_event(self, event) -> None:
        self.texts.setdefault(event.request_id, []).extend(event.token_ids)
        self.counts[event.request_id] = (event.num_draft_tokens, event.num_accepted_tokens)
        if event.finish_reason and not self.loop.num_live:
            self.loop.stop()

    def run(self, requests: list[GenerationRequest]) -> list[list[int]]:
        for request_id, request in enumerate(requests):
            assert self.loop.submit(request_id, request)
        self.loop.run()
        return [self.texts[request_id] for request_id in range(len(requests))]


def make_requests(draft_tokens: list[int]) -> list[GenerationRequest]:
    """One request per draft length, greedy and sampled in turn, some prompts longer than a step."""
    rng = np.random.default_rng(0)
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 7}]
    return [
        GenerationRequest(
            tuple(rng.integers(3, VOCAB, int(rng.choice([3, 17, 40]))).tolist()),
            SamplingParams(seed=2**60 + i, **kinds[i % 4]),
            max_tokens=14,
            drafter=0 if drafts else NO_DRAFTER,
            num_draft_tokens=drafts,
        )
        for i, drafts in enumerate(draft_tokens)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_as_its_own_drafter_is_always_right(dtype):
    served = Served(runner("target", dtype), runner("drafter", dtype))
    served.run(make_requests([1, 2, 3, 4, 5, 6, 7, 8]))
    for drafted, accepted in served.counts.values():
        assert drafted > 0
        assert accepted == drafted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_as_drafter_changes_no_token(dtype):
    plain = Served(runner("target", dtype), runner("drafter", dtype)).run(make_requests([0] * 8))
    served = Served(runner("target", dtype), runner("drafter", dtype, layers=1))
    assert served.run(make_requests([1, 2, 3, 4, 5, 6, 7, 8])) == plain
    drafted, accepted = np.sum(list(served.counts.values()), axis=0)
    assert 0 < accepted < drafted


def test_a_sequence_beyond_the_drafters_context_gets_no_drafts():
    drafting = Drafting(DraftModelDrafter(runner("short", context=20)))
    expected = plain_decoding(TargetEngine(runner("alone")), list(range(3, 21)), 3)
    case = {"slot": 0, "num_fed": 0, "feed": list(range(3, 21)), "drafts": 6}
    assert drafting.step([case]) == [expected]  # at positions 18, 19 and, never computed, 20
    far = {"slot": 0, "num_fed": 18, "feed": [5, 6, 7], "drafts": 6}
    near = {"slot": 1, "num_fed": 0, "feed": [5], "drafts": 1}
    assert [len(draft) for draft in drafting.step([far, near])] == [0, 1]
    assert drafting.step([far]) == [[]]


# ------------------------------------------------------------------------ loading


def save(folder, tokens: list[str], vocab_size: int | None = None, eos: str = "</s>") -> str:
    """A folder with a word-level tokenizer and the configuration of a tiny model."""
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token=eos).save_pretrained(folder)
    AutoConfig.for_model("llama", **{**COMMON, "vocab_size": vocab_size or len(tokens)}).save_pretrained(
        folder
    )
    return str(folder)


TOKENS = ["<unk>", "</s>", "<end>", "a", "b", "c"]


def test_equal_vocabularies_are_compatible(tmp_path):
    check_compatible(save(tmp_path / "target", TOKENS), save(tmp_path / "draft", TOKENS))


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "message"),
    [
        ([*TOKENS[:4], "x", "c"], None, r"1 token ids differ .* id 4: 'x' against 'b'"),
        (TOKENS[:5], None, r"\(5 tokens against 6\).* id 5: nothing against 'c'"),
        ([*TOKENS, "d"], None, r"\(7 tokens against 6\).* id 6: 'd' against nothing"),
        (TOKENS, 64, "has a vocabulary of 64, but the target .* one of 6"),
    ],
)
def test_another_vocabulary_is_refused_and_the_message_says_what_differs(
    tmp_path, tokens, vocab_size, message
):
    target, draft = save(tmp_path / "target", TOKENS), save(tmp_path / "draft", tokens, vocab_size)
    with pytest.raises(LoadError, match=message):
        check_compatible(target, draft)


def test_another_end_token_is_only_warned_of(tmp_path, caplog):
    target, draft = save(tmp_path / "target", TOKENS), save(tmp_path / "draft", TOKENS, eos="<end>")
    with caplog.at_level(logging.WARNING):
        check_compatible(target, draft)
    assert "eos_token_id is 2, the target's 1" in caplog.text


def test_a_missing_draft_model_is_refused(tmp_path):
    with pytest.raises(LoadError, match="nowhere"):
        check_compatible(save(tmp_path / "target", TOKENS), str(tmp_path / "nowhere"))
