"""One streamed request to a server, seen by a client's clock; the same code for every kind of server.

angelspec  Triton's ``POST /v2/models/NAME/generate_stream``
openai     ``POST /v1/chat/completions``, as llama.cpp's and vLLM's servers have it
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from angelspec_client.sse import EventDecoder

Clock = Callable[[], float]
KINDS = ("angelspec", "openai")
DEFAULT_MODELS = {"angelspec": "angelspec", "openai": "default"}


class StreamError(Exception):
    """The server answered with an error, or not with what was asked for."""


@dataclass(frozen=True)
class Task:
    """What is asked of every server."""

    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of the body for one server alone


@dataclass
class Reply:
    """What came back.  Times are seconds of the client's clock."""

    start: float = 0.0  # when the request was sent
    end: float = 0.0  # when its last event or its error came
    text_times: list[float] = field(default_factory=list)  # of events with text
    text: str = ""
    finish_reason: str | None = None
    finish_time: float | None = None
    output_tokens: int | None = None  # as the server counts
    prompt_tokens: int | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Output tokens; a server that does not count them is taken to send one with every event."""
        return len(self.text_times) if self.output_tokens is None else self.output_tokens


def request_body(kind: str, model: str, task: Task) -> dict[str, Any]:
    """The JSON body: greedy, and exactly ``max_tokens`` new tokens, past any end of text."""
    common = {"max_tokens": task.max_tokens, "temperature": 0.0, "stream": True, "ignore_eos": True}
    if kind == "angelspec":
        return {"messages": json.dumps(list(task.messages)), **common, **task.extra}
    usage = {"stream_options": {"include_usage": True}}
    return {"model": model, "messages": list(task.messages), **common, **usage, **task.extra}


def request_url(kind: str, url: str, model: str) -> str:
    """Where the body goes."""
    return f"{url}/v2/models/{model}/generate_stream" if kind == "angelspec" else f"{url}/v1/chat/completions"


def read_event(kind: str, data: str, now: float, reply: Reply) -> None:
    """Add one event to the reply.

    Raises:
        StreamError: the event is an error, or no JSON object.
    """
    if data == "[DONE]":
        return
    try:
        event: Any = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise StreamError(f"an event is no JSON object: {data[:80]!r}")
    if event.get("error") is not None:
        error = event["error"]
        raise StreamError(str(error.get("message", error) if isinstance(error, dict) else error))
    text, finish_reason, usage = _fields(kind, event)
    if text:
        reply.text_times.append(now)
        reply.text += text
    if finish_reason:
        reply.finish_reason, reply.finish_time = finish_reason, now
    reply.output_tokens = usage.get("output", reply.output_tokens)
    reply.prompt_tokens = usage.get("prompt", reply.prompt_tokens)


def _fields(kind: str, event: Mapping[str, Any]) -> tuple[str, str | None, dict[str, int]]:
    """(text, finish reason, token counts) of an event, as far as it has them."""
    if kind == "angelspec":
        names = {"output": "num_output_tokens", "prompt": "num_input_tokens"}
        usage = {key: event[name] for key, name in names.items() if name in event}
        return event.get("text_output") or "", event.get("finish_reason"), usage
    choices = event.get("choices") or [{}]
    names = {"output": "completion_tokens", "prompt": "prompt_tokens"}
    counts = event.get("usage") or {}
    usage = {key: counts[name] for key, name in names.items() if counts.get(name) is not None}
    text = (choices[0].get("delta") or {}).get("content") or ""
    return text, choices[0].get("finish_reason"), usage


def problem(reply: Reply, max_tokens: int) -> str | None:
    """Why a reply whose stream ended counts as failed; None: it is good."""
    if reply.finish_reason != "length":
        return f"finish reason '{reply.finish_reason}' instead of 'length'"
    if reply.tokens < max_tokens:
        return f"{reply.tokens} tokens instead of {max_tokens}"
    if not reply.text_times:
        return "no text came"
    return None


async def read_stream(
    kind: str, pieces: AsyncIterable[bytes], max_tokens: int, reply: Reply, clock: Clock
) -> None:
    """Fill the reply from the body of a response.

    Raises:
        StreamError: an event is an error, or the stream ended early or otherwise than asked for.
    """
    decoder = EventDecoder()
    async for piece in pieces:
        now = clock()
        for data in decoder.feed(piece):
            read_event(kind, data, now, reply)
    if (reason := problem(reply, max_tokens)) is not None:
        raise StreamError(reason)


async def send(
    session: aiohttp.ClientSession,
    kind: str,
    url: str,
    model: str,
    task: Task,
    timeout_s: float,
    clock: Clock = time.perf_counter,
) -> Reply:
    """Send one request and wait for all of it; what goes wrong is in ``reply.error``."""
    body = request_body(kind, model, task)
    reply = Reply(start=clock())
    try:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with session.post(request_url(kind, url, model), json=body, timeout=limit) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {(await response.text())[:200]}")
            await read_stream(kind, response.content.iter_any(), task.max_tokens, reply, clock)
    except (asyncio.TimeoutError, TimeoutError):
        reply.error = f"not finished within {timeout_s:g} s"
    except (StreamError, aiohttp.ClientError, OSError) as error:
        reply.error = str(error) or type(error).__name__
    reply.end = clock()
    return reply
