"""Figures of many generations: latency, throughput, acceptance length.  Times are the client's.

TTFT   time to first token: from sending the request to the first chunk with tokens.
ITL    inter-token latency: a chunk's n tokens share the time since the chunk before it, so it counts as n
       gaps of that time / n.  The tokens of a first chunk have no gap.
TPOT   time per output token after the first chunk, one value per generation: the mean of its ITL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_client.results import Chunk, Generation, acceptance_length


@dataclass(frozen=True)
class Summary:
    """Figures of one set of generations; NaN where there is nothing to measure."""

    requests: int
    output_tokens: int
    p50_ms: float  # of the whole request
    p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float
    acceptance_length: float  # output tokens per step of the target, bonus included, over all generations


def summarize(generations: Sequence[Generation]) -> Summary:
    """The figures of generations that ended well."""
    latency_ms = np.array([1000.0 * generation.duration_s for generation in generations])
    ttft_ms = np.array([1000.0 * generation.ttft_s for generation in generations])
    gaps_ms = [1000.0 * token_gaps(generation.chunks) for generation in generations]
    tpot_ms = np.array([gaps.mean() for gaps in gaps_ms if len(gaps)])
    itl_ms = np.concatenate(gaps_ms) if gaps_ms else np.zeros(0)
    output_tokens = sum(generation.num_output_tokens for generation in generations)
    accepted = sum(generation.total_accepted_draft_tokens for generation in generations)
    return Summary(
        requests=len(generations),
        output_tokens=output_tokens,
        p50_ms=percentile(latency_ms, 50),
        p99_ms=percentile(latency_ms, 99),
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p99_ms=percentile(ttft_ms, 99),
        itl_p50_ms=percentile(itl_ms, 50),
        itl_p99_ms=percentile(itl_ms, 99),
        tpot_p50_ms=percentile(tpot_ms, 50),
        acceptance_length=acceptance_length(output_tokens, accepted),
    )


def token_gaps(chunks: Sequence[Chunk]) -> NDArray[np.float64]:
    """Seconds before each token that follows the first chunk with tokens.

    Chunks without tokens bring held-back text only; their time counts for the next token.
    """
    with_tokens = [chunk for chunk in chunks if chunk.token_ids]
    times = np.array([chunk.time_s for chunk in with_tokens])  # [num_chunks]
    counts = np.array([len(chunk.token_ids) for chunk in with_tokens], np.int64)  # [num_chunks]
    return np.repeat(np.diff(times) / counts[1:], counts[1:])


def percentile(values: NDArray[Any], percent: float) -> float:
    """Percentile by linear interpolation; NaN without values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")
