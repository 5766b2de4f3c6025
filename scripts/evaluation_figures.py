"""What an evaluation says of a drafter: figures of its rounds, and a warning when they look wrong.

acceptance length    tokens of a verify step on average, the target's own ("bonus") included: 1 for plain
                     decoding.  The step that computes the prompt and gives the first token is no verify step.
first acceptance     steps whose first draft token is accepted, of the steps that have one.
survival             at i: steps that accept at least i draft tokens, of those that wanted so many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from angelspec_backend.drafters.spec import DrafterSpec
from evaluation_measure import Answer, Round, StepTime
from evaluation_serving import Served

LOW_ACCEPTANCE = 0.5
"""Below this first acceptance something is probably wrong with a trained drafter."""


@dataclass(frozen=True)
class Acceptance:
    """Figures of some answers; None where nothing was drafted."""

    requests: int
    output_tokens: int
    verify_steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    acceptance_length: float | None
    first_acceptance: float | None
    acceptance_by_position: list[float]  # survival, up to the longest draft that was wanted
    perplexity: float | None  # of the answers under the target at temperature 1


def acceptance(answers: Sequence[Answer]) -> Acceptance:
    """The figures of some answers."""
    rounds = [each for answer in answers for each in answer.rounds]
    tokens = sum(len(answer.token_ids) for answer in answers)
    accepted = sum(each.accepted for each in rounds)
    drafting = [each for each in rounds if each.drafted]
    return Acceptance(
        requests=len(answers),
        output_tokens=tokens,
        verify_steps=len(rounds),
        draft_tokens=sum(each.drafted for each in rounds),
        accepted_draft_tokens=accepted,
        acceptance_length=1 + accepted / len(rounds) if rounds else None,
        first_acceptance=sum(each.accepted > 0 for each in drafting) / len(drafting) if drafting else None,
        acceptance_by_position=[
            _share(rounds, place) for place in range(1, 1 + max((r.wanted for r in rounds), default=0))
        ],
        perplexity=math.exp(-sum(answer.log_prob for answer in answers) / tokens) if tokens else None,
    )


def _share(rounds: Sequence[Round], place: int) -> float:
    wanted = [each for each in rounds if each.wanted >= place]
    return sum(each.accepted >= place for each in wanted) / len(wanted)


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of the steps in which the most rows decode and nothing else is computed."""

    num_rows: int
    draft_ms: float
    target_ms: float
    share: float  # median of drafting over the target's verify step behind it


def cost(times: Sequence[StepTime]) -> Cost | None:
    """What steps cost; None when none was free of prompts."""
    if not times:
        return None
    rows = max(each.num_rows for each in times)
    full = [each for each in times if each.num_rows == rows]
    return Cost(
        rows,
        1e3 * statistics.median(each.draft_s for each in full),
        1e3 * statistics.median(each.target_s for each in full),
        statistics.median(each.draft_s / each.target_s for each in full),
    )


@dataclass(frozen=True)
class Wall:
    """Times of one answer at a time; None where answers had one step only."""

    ms_per_token: float | None  # behind each answer's first tokens
    speedup: float | None  # median over the prompts of plain decoding's ms_per_token over this one's
    draft_ms: float | None
    target_ms: float | None


def wall(runs: Sequence[Served], plain: Sequence[Served]) -> Wall:
    """Times of runs of one request each, next to those of plain decoding."""
    answers = [run.answers[0] for run in runs]
    pairs = [
        (_seconds(base.answers[0]), _seconds(run.answers[0])) for base, run in zip(plain, runs, strict=True)
    ]
    ratios = [base / own for base, own in pairs if base and own]
    tokens = sum(len(answer.token_ids) - answer.num_first for answer in answers)
    spent = cost([each for run in runs for each in run.times])
    return Wall(
        1e3 * sum(answer.last_s - answer.first_s for answer in answers) / tokens if tokens else None,
        statistics.median(ratios) if ratios else None,
        spent.draft_ms if spent else None,
        spent.target_ms if spent else None,
    )


def _seconds(answer: Answer) -> float:
    """Seconds per token behind the first ones, 0 without any."""
    tokens = len(answer.token_ids) - answer.num_first
    return (answer.last_s - answer.first_s) / tokens if tokens else 0.0


def same_perplexity(one: Acceptance, other: Acceptance, exact: bool) -> bool:
    """Whether the target gave the same answers the same probabilities.

    exact: its logits do not depend on the batch, so that only the order of a sum may make a difference.
    """
    if one.perplexity is None or other.perplexity is None:
        return one.perplexity == other.perplexity
    return math.isclose(one.perplexity, other.perplexity, rel_tol=1e-9 if exact else 1e-2)


def warning(label: str, temperature: float, found: Acceptance, spec: DrafterSpec | None) -> str:
    """What to look at when a trained drafter is hardly ever right; "" when all is well.

    spec: None for a drafter without training, which may be right as seldom as it likes.
    """
    first = found.first_acceptance
    if spec is None or (first is not None and first >= LOW_ACCEPTANCE):
        return ""
    if first is None:
        return f"warning: {label} at temperature {temperature:g} drafted nothing at all"
    trained = spec.target
    target, mode = trained.name or "a target it does not name", trained.mode or "a mode it does not name"
    taps = ", ".join(map(str, spec.tap_ids))
    return (
        f"warning: {label} at temperature {temperature:g}: its first draft token was accepted in {first:.0%} "
        f"of the verify steps that had one, below {LOW_ACCEPTANCE:.0%}.  Likely causes:\n"
        f"  - wrong template or mode: it was trained for {mode}; are the prompts chats, in the chat template "
        f"and mode (system prompt, thinking or not) of its training?\n"
        f"  - wrong tap convention: it reads layers {taps}, counted from 0 by their outputs; in a checkpoint "
        f"that counts the embedding as 0 each is one too high\n"
        f"  - mismatched target: it was trained for {target}; another revision, fine-tune or dtype drafts "
        f"badly\n"
        f"  - not trained enough, or on other text than these prompts"
    )
