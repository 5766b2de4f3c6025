"""Chunks as responses of the public model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from angelspec_backend.core.output import Chunk
from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.core.request import FinishReason
from angelspec_backend.triton import bridge

FAILURES = {
    FinishReason.ERROR: (bridge.INTERNAL, "the request failed"),
    FinishReason.SHUTDOWN: (bridge.UNAVAILABLE, "the server is shutting down"),
}
"""Ends that a client gets as an error rather than as a last chunk: (code, text if there is no other)."""


def merge(chunks: Sequence[Chunk]) -> Chunk:
    """Successive chunks of one stream as one; counts are totals, so the last ones stand."""
    if len(chunks) == 1:
        return chunks[0]
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return replace(chunks[-1], text="".join(chunk.text for chunk in chunks), token_ids=token_ids)


def to_response(chunk: Chunk, request: GenerationRequest) -> Any:
    """The response for a chunk; the last one also says why the stream ended and how much it was."""
    if chunk.finish_reason in FAILURES:
        code, text = FAILURES[chunk.finish_reason]
        return bridge.error_response(chunk.error or text, code)
    # Every output is [1, n]: the model has a batch dimension of 1.
    arrays: dict[str, Any] = {
        "text_output": np.array([[chunk.text.encode("utf-8", "replace")]], dtype=object),
        "output_ids": np.array([chunk.token_ids], np.int32),
    }
    if chunk.finish_reason is not None:
        arrays |= {
            "finish_reason": np.array([[chunk.finish_reason.value.encode()]], dtype=object),
            "num_input_tokens": np.array([[len(request.prompt_token_ids)]], np.int32),
            "num_output_tokens": np.array([[chunk.num_output_tokens]], np.int32),
            "seed": np.array([[request.sampling.seed]], np.uint64),
            "total_draft_tokens": np.array([[chunk.num_draft_tokens]], np.int32),
            "total_accepted_draft_tokens": np.array([[chunk.num_accepted_tokens]], np.int32),
        }
    return pb_utils.InferenceResponse(bridge.to_tensors(arrays))
