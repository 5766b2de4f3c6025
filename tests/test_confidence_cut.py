"""Drafts end before the first token that is less likely to be accepted than it must be."""

from __future__ import annotations

import numpy as np
import pytest

import test_block_drafter
import test_chain_drafter
from angelspec_backend.core.messages import ROW, split_rows
from angelspec_backend.drafters.chain_drafter import ChainModules
from angelspec_backend.drafters.choice import Drafts
from angelspec_backend.drafters.matches import LONGEST, Matches, Text
from angelspec_backend.drafters.ngram import NgramDrafter


def brute_force(tokens: list[int], confidence: list[float], min_chance: float) -> list[int]:
    kept, chance = [], 1.0
    for token, likely in zip(tokens, confidence, strict=True):
        chance *= likely
        if chance < min_chance:
            break
        kept.append(token)
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_a_cut_keeps_the_tokens_before_the_first_unlikely_one(seed):
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, 6, 20)
    drafts = Drafts.empty(lens)
    drafts.token_ids[:] = rng.integers(0, 100, drafts.token_ids.shape)
    drafts.confidence[:] = rng.random(drafts.confidence.shape) ** 0.3
    least = rng.choice([0.0, 0.2, 0.5, 0.9, 1.0], 20).astype(np.float32)
    output = drafts.cut(least).output()
    for row, found in enumerate(split_rows(output.token_ids, output.lens)):
        span = slice(0, lens[row])
        whole = drafts.token_ids[row, span].tolist(), drafts.confidence[row, span].tolist()
        assert found.tolist() == brute_force(*whole, float(least[row]))


@pytest.mark.parametrize("tests", [test_chain_drafter, test_block_drafter])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_network_drafters_cut_each_row_by_its_own_least_chance(tests, temperature):
    kind = "mtp" if tests is test_chain_drafter else "dfly"
    cases = []
    for slot in range(3):
        text, states = tests.random_text(kind, slot)
        case = {"slot": slot, "num_fed": 0, "num_feed": 4 + slot, "num_draft_tokens": 4, "seed": slot}
        cases.append({**case, "text": text, "states": states, "temperature": temperature})
    whole = tests.Serving(kind).draft(cases)
    chances = [np.cumprod(confidence).tolist() for _, confidence in whole]
    least = [0.0, chances[1][1] * 1.01, 0.5]  # no row ends by another's
    serving = tests.Serving(kind)
    draft = serving.drafter.draft
    serving.drafter.draft = lambda rows, *arrays: draft(rows, *arrays).cut(rows["min_chance"])
    found = serving.draft([{**case, "min_chance": each} for case, each in zip(cases, least, strict=True)])
    for (tokens, _), (drafted, confidence), each in zip(found, whole, least, strict=True):
        assert tokens == brute_force(drafted, np.float32(confidence).tolist(), np.float32(each))
    assert len(found[0][0]) == 4 > len(found[1][0])


def test_a_chain_does_not_run_on_for_rows_that_have_ended(monkeypatch):
    text, states = test_chain_drafter.random_text("mtp", 0)
    case = {"slot": 0, "num_fed": 0, "num_feed": 5, "num_draft_tokens": 4, "text": text, "states": states}
    serving, steps, step = test_chain_drafter.Serving("mtp"), [], ChainModules._step
    monkeypatch.setattr(
        ChainModules, "_step", lambda self, rows, *rest: steps.append(len(rows)) or step(self, rows, *rest)
    )
    serving.draft([{**case, "min_chance": 1.0}, {**case, "slot": 1, "min_chance": 0.0}])
    assert steps == [2, 1, 1, 1]


def repeating(drafter: NgramDrafter, min_chance: float, wrong: bool) -> list[int]:
    """The lengths of drafts while a text repeats itself, or seems to."""
    text, fed, lengths = [1, 2, 3, 4, 5, 6, 7, 8] * 2, 0, []
    for step in range(30):
        row = np.zeros(1, ROW)
        row["num_fed"], row["num_feed"], row["num_draft_tokens"] = fed, len(text) - fed, 4
        row["min_chance"] = min_chance
        output = drafter.propose(
            row, np.array(text[fed:], np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint8)
        )
        lengths.append(len(output.token_ids))
        fed = len(text)
        if wrong:
            text += [100 + step, 7, 8]
        else:
            text += [text[-8 + i] for i in range(lengths[-1] + 1)]
    return lengths


def test_an_ngram_drafter_drafts_what_has_been_right_and_no_more():
    right, wrong = (repeating(NgramDrafter(2, 4, 1), 0.6, wrong) for wrong in (False, True))
    assert right[-1] == 4
    assert wrong[-1] == 0


def test_chances_of_matches_are_the_shares_that_were_right():
    rng = np.random.default_rng(0)
    overall = Matches()
    own = [Matches(overall) for _ in range(20)]
    for _ in range(4000):
        size = int(rng.integers(1, 8))
        own[rng.integers(20)].observe(size, bool(rng.random() < size / 8))
    for size in range(1, 8):
        assert overall.chance(size) == pytest.approx(size / 8, abs=0.08)
    assert overall.chance(LONGEST + 5) == overall.chance(LONGEST) == 0.5  # unknown


def test_what_was_looked_up_but_not_wanted_is_learnt_from_all_the_same():
    overall = Matches()
    text = Text(1, 2, overall)
    text.extend([1, 2, 3, 4, 1, 2])
    assert text.look_up(3, min_chance=1.0) == ([], 0.0)
    text.extend([3, 4, 9])  # right, right, wrong
    assert [overall.chance(size) > 0.5 for size in (2, 3, 4)] == [True, True, False]
