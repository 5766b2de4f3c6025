"""From token events to responses: the output thread, which runs beside the next engine step."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass, field
from typing import Any

from angelspec_backend.core.loop import SpeculativeLoop
from angelspec_backend.core.output import Chunk, Decode, OutputStream
from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.core.request import FinishReason, TokenEvent
from angelspec_backend.triton import bridge
from angelspec_backend.triton.drain import Drain
from angelspec_backend.triton.metrics import ServingMetrics
from angelspec_backend.triton.responses import merge, to_response

POLL_INTERVAL, LONGEST_POLL_INTERVAL = 0.02, 0.2
"""Seconds between two looks for clients that left; asking for one takes about 30 us."""

POLL_SHARE = 0.02
"""The share of the thread's time that goes into asking, within these bounds, however many requests are live:
every question wakes the server for its answer, on cores that the target wants."""

logger = logging.getLogger(__name__)


@dataclass
class LiveStream:
    """One request on its way out; touched by the output thread alone once it is registered."""

    request: GenerationRequest
    sender: Any
    output: OutputStream
    arrival: float = field(default_factory=time.monotonic)
    last_token_at: float = 0.0  # 0: none yet
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cancelled: bool = False


class Streams:
    """All live streams.  ``run`` is the output thread's body."""

    def __init__(self, decode: Decode, metrics: ServingMetrics, drain: Drain) -> None:
        self._decode = decode
        self._metrics = metrics
        self._drain = drain
        self._live: dict[int, LiveStream] = {}
        self._events: queue.SimpleQueue[TokenEvent | None] = queue.SimpleQueue()
        self._next_poll = 0.0
        self._num_deliveries = 0

    # ------------------------------------------------------------------ other threads

    def open(self, request_id: int, request: GenerationRequest, sender: Any) -> None:
        """Register a request before it is submitted to the loop."""
        self._live[request_id] = LiveStream(request, sender, OutputStream(request, self._decode))
        self._events.put(TokenEvent(request_id))  # wakes the output thread: now there is a client to watch

    def forget(self, request_id: int) -> None:
        """Take back ``open``: the loop refused the request, so nothing will come for it."""
        del self._live[request_id]

    def on_tokens(self, event: TokenEvent) -> None:
        """Take news from the loop thread."""
        self._events.put(event)

    def stop(self) -> None:
        """Make ``run`` send what has arrived so far, fail the rest, and return."""
        self._events.put(None)

    # ------------------------------------------------------------------ the output thread

    def run(self, loop: SpeculativeLoop) -> None:
        """Send chunks and look for clients that left, until ``stop``."""
        running = True
        while running:
            events = self._wait()
            running = None not in events
            try:
                self._deliver([event for event in events if event is not None], loop)
                self._poll(loop)
            except Exception:  # a defect here must not silence every other stream
                logger.exception("the output thread failed")
            num_running = len(loop.scheduler.running)
            # What is not running waits, also what the loop has not taken in yet.
            num_waiting = max(len(self._live) - num_running, 0)
            totals = {
                "preemptions": loop.scheduler.num_preemptions,
                "cached_tokens": loop.scheduler.num_cached_tokens,
            }
            self._metrics.publish(num_running, num_waiting, totals)
        for request_id in list(self._live):
            self._finish(request_id, Chunk("", (), FinishReason.SHUTDOWN))

    def _wait(self) -> list[TokenEvent | None]:
        """Everything that has arrived; waits for the first event, but not past the next poll."""
        timeout = max(self._next_poll - time.monotonic(), 0.0) if self._live else 1.0
        events: list[TokenEvent | None] = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _deliver(self, events: list[TokenEvent], loop: SpeculativeLoop) -> None:
        """Send one response per stream that has something new, however many events brought it.

        So a slow receiver gets larger chunks instead of a growing backlog.
        """
        chunks: dict[int, list[Chunk]] = {}
        self._num_deliveries += 1
        sample = self._num_deliveries % max(len(events), 1)
        for index, event in enumerate(events):
            stream = self._live.get(event.request_id)
            if stream is None or stream.output.finished:
                continue  # it ended here before it ended in the loop
            if not (event.token_ids or event.finish_reason):
                continue
            self._measure(stream, event, index == sample)
            if chunk := _push(stream, event):
                chunks.setdefault(event.request_id, []).append(chunk)
                if chunk.finish_reason and not event.finish_reason:  # seen only here: a stop string
                    loop.cancel(event.request_id, chunk.finish_reason)
        for request_id, parts in chunks.items():
            chunk = merge(parts)
            if chunk.finish_reason:
                self._finish(request_id, chunk)
            else:
                stream = self._live[request_id]
                bridge.send(stream.sender, to_response(chunk, stream.request), final=False)

    def _finish(self, request_id: int, chunk: Chunk) -> None:
        stream = self._live.pop(request_id)
        bridge.send(stream.sender, to_response(chunk, stream.request), final=True)
        assert chunk.finish_reason is not None
        self._metrics.finish(chunk.finish_reason.value)
        self._metrics.observe("request_seconds", time.monotonic() - stream.arrival)

    def _poll(self, loop: SpeculativeLoop) -> None:
        """End the requests whose client has left, running or waiting, and all when draining took too long."""
        started = time.monotonic()
        if started < self._next_poll:
            return
        overdue = self._drain.overdue()
        for request_id, stream in self._live.copy().items():
            if stream.cancelled:
                continue
            left = stream.sender.is_cancelled()
            if left or overdue:
                stream.cancelled = True
                loop.cancel(request_id, FinishReason.CANCELLED if left else FinishReason.SHUTDOWN)
        now = time.monotonic()
        pause = max(POLL_INTERVAL, (now - started) / POLL_SHARE)
        self._next_poll = now + min(pause, LONGEST_POLL_INTERVAL)

    def _measure(self, stream: LiveStream, event: TokenEvent, in_sample: bool) -> None:
        if not event.token_ids:
            return
        now = time.monotonic()
        if stream.last_token_at:
            # Each observation is a message to the server, and the streams of a step wait equally long.
            if in_sample:
                seconds = (now - stream.last_token_at) / len(event.token_ids)
                self._metrics.observe("inter_token_seconds", seconds)
        else:
            self._metrics.observe("time_to_first_token_seconds", now - stream.arrival)
            self._metrics.count("prompt_tokens", len(stream.request.prompt_token_ids))
        stream.last_token_at = now
        self._metrics.count("output_tokens", len(event.token_ids))
        drafted = event.num_draft_tokens - stream.num_draft_tokens
        if drafted:
            self._metrics.count_draft(drafted, event.num_accepted_tokens - stream.num_accepted_tokens)
        stream.num_draft_tokens = event.num_draft_tokens
        stream.num_accepted_tokens = event.num_accepted_tokens


def _push(stream: LiveStream, event: TokenEvent) -> Chunk | None:
    try:
        return stream.output.push(event)
    except Exception:  # its tokens cannot be decoded; other streams are none the worse for it
        logger.exception("an output could not be decoded")
        stream.output.finished = True
        return Chunk("", (), FinishReason.ERROR, "internal error, see the server's log")
