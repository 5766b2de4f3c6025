"""Closed-loop load on scripted streams under a clock of its own: every figure has an exact value."""

import asyncio
import gc
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import load
from angelspec_client import AsyncStream, ServerError
from angelspec_client.metrics import summarize, token_gaps
from angelspec_client.progress import Policy


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to the next thing to do."""

    def __init__(self):
        super().__init__()
        self.now = 100.0
        select = self._selector.select

        def jump(timeout):
            if timeout:
                self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


class ScriptedCall:
    """A call that brings (seconds since the last, number of tokens) one after another."""

    def __init__(self, script, **usage):
        self.script = list(script)
        self.count = sum(n or 0 for _, n in script)
        self.usage = {
            "finish_reason": ["length"],
            "num_input_tokens": [1],
            "num_output_tokens": [self.count],
            "seed": [0],
            "total_draft_tokens": [0],
            "total_accepted_draft_tokens": [0],
        } | usage

    async def receive(self):
        if not self.script:
            return None
        gap, tokens = self.script.pop(0)
        await asyncio.sleep(gap)
        if tokens is None:
            raise ServerError("broken")
        outputs = {"text_output": ["x"], "output_ids": [1] * tokens}
        return outputs | ({} if self.script else self.usage), time.perf_counter()

    async def arrive(self):
        return ()

    def close(self):
        pass


class ScriptedSender:
    """Answers each request with its script, and counts the requests in flight."""

    def __init__(self, scripts):
        self.scripts = scripts
        self.in_flight = self.most = 0
        self.order = []

    async def send(self, request):
        self.order.append(request.number)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        script = self.scripts[request.number]
        call = script if isinstance(script, ScriptedCall) else ScriptedCall(script)
        try:
            return await AsyncStream(lambda _: call, Policy()).read()
        finally:
            self.in_flight -= 1

    async def close(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    """A virtual loop whose clock is that of the measurements too."""
    loop = VirtualLoop()
    monkeypatch.setattr(time, "perf_counter", loop.time)
    yield loop
    loop.close()


def requests(scripts, **options):
    return [load.Request(number, [], "ab"[number % 2], options) for number in range(len(scripts))]


def run(loop, scripts, concurrency, **options):
    sender = ScriptedSender(scripts)
    window = loop.run_until_complete(load.run_window(sender, requests(scripts, **options), concurrency))
    return window, sender


def closed_loop_seconds(durations, concurrency):
    """When the last of the requests ends if each starts on the first worker that is free."""
    free = [0.0] * concurrency
    for duration in durations:
        worker = free.index(min(free))
        free[worker] += duration
    return max(free)


streams = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(streams, min_size=1, max_size=12), st.integers(1, 6))
def test_a_window_measures_what_the_streams_did(scripts, concurrency):
    with pytest.MonkeyPatch.context() as patch:
        loop = VirtualLoop()
        patch.setattr(time, "perf_counter", loop.time)
        scripts = [[(gap / 8, tokens) for gap, tokens in script] for script in scripts]
        window, sender = run(loop, scripts, concurrency)
        loop.close()
    durations = [sum(gap for gap, _ in script) for script in scripts]
    assert sender.order == list(range(len(scripts)))
    assert sender.most == min(concurrency, len(scripts))
    assert window.duration_s == pytest.approx(closed_loop_seconds(durations, concurrency))
    tokens = sum(n for script in scripts for _, n in script)
    assert window.output_tokens == tokens
    assert window.tokens_per_second == pytest.approx(tokens / window.duration_s)

    generations = [window.generations[number] for number in range(len(scripts))]
    summary = summarize(generations)
    np.testing.assert_allclose([g.duration_s for g in generations], durations)
    np.testing.assert_allclose([g.ttft_s for g in generations], [script[0][0] for script in scripts])
    for percent, name in ((50, "p50_ms"), (99, "p99_ms")):
        assert getattr(summary, name) == pytest.approx(1000 * np.percentile(durations, percent))
    gaps = [gap / n for script in scripts for gap, n in script[1:] for _ in range(n)]
    np.testing.assert_allclose(np.concatenate([token_gaps(g.chunks) for g in generations]), gaps)
    if gaps:
        assert summary.itl_p50_ms == pytest.approx(1000 * np.percentile(gaps, 50))
        assert summary.itl_p99_ms == pytest.approx(1000 * np.percentile(gaps, 99))


def test_tokens_of_a_chunk_share_the_time_since_the_chunk_before(clock):
    window, _ = run(clock, [[(2.0, 3), (0.9, 3), (0.5, 1)]], 1)
    generation = window.generations[0]
    np.testing.assert_allclose(token_gaps(generation.chunks), [0.3, 0.3, 0.3, 0.5])
    assert generation.ttft_s == pytest.approx(2.0)
    assert summarize([generation]).tpot_p50_ms == pytest.approx(1000 * 1.4 / 4)


def test_every_way_to_fail_counts_as_an_error_and_its_tokens_do_not(clock):
    good = [(1.0, 2), (1.0, 2)]
    scripts = [
        good,
        [(1.0, 2), (0.5, None)],  # an error in the middle
        [(0.5, None)],  # refused
        ScriptedCall(good, finish_reason=["cancelled"]),
        [(1.0, 3)],  # three tokens where four were asked for
        ScriptedCall(good, num_output_tokens=[5]),  # not as many as it says
        good,
    ]
    window, _ = run(clock, scripts, 2, max_tokens=4, ignore_eos=True)
    assert sorted(window.generations) == [0, 6]
    assert len(window.errors) == 5
    assert len(window.requests) == 7
    assert window.output_tokens == 8
    texts = sorted(str(error) for error in window.errors)
    assert texts == [
        "a generation ended with 'cancelled'",
        "a generation has 3 of 4 tokens",
        "a generation of 5 tokens brought 4",
        "broken",
        "broken",
    ]


def test_fewer_tokens_are_right_where_the_end_of_text_may_come(clock):
    window, _ = run(clock, [ScriptedCall([(1.0, 3)], finish_reason=["eos"])], 1, max_tokens=4)
    assert not window.errors


def test_warm_up_is_short_and_tells_when_nothing_works(clock):
    sender = ScriptedSender([[(1.0, 8)]] * 20)
    wanted = requests([None] * 20, max_tokens=99)
    seen = []
    sender.send, send = lambda request: seen.append(request) or send(request), sender.send
    clock.run_until_complete(load.warm_up(sender, wanted, 64))
    assert [request.options["max_tokens"] for request in seen] == [load.WARM_UP_TOKENS] * 8
    seen.clear()
    clock.run_until_complete(load.warm_up(sender, wanted, 3, max_tokens=200))
    assert [request.options["max_tokens"] for request in seen] == [99] * 3
    broken = ScriptedSender([[(0.1, None)]] * 20)
    with pytest.raises(ServerError, match="broken"):
        clock.run_until_complete(load.warm_up(broken, wanted, 4))


def test_the_cost_of_the_load_itself_is_measured(clock):
    window, _ = run(clock, [[(0.1, 1)] * 200 for _ in range(20)], 4)
    assert 0 < window.cpu_s < 10


def test_the_figures_do_not_depend_on_the_order_of_the_answers(clock):
    scripts = [[(random.Random(n).random(), 1)] * 3 for n in range(9)]
    one, _ = run(clock, scripts, 3)
    other = summarize([one.generations[number] for number in sorted(one.generations, reverse=True)])
    assert other == summarize([one.generations[number] for number in sorted(one.generations)])


def test_garbage_is_looked_for_before_and_after_a_window_but_not_during_it(clock):
    seen = []

    class Watching(ScriptedSender):
        async def send(self, request):
            seen.append(gc.isenabled())
            return await super().send(request)

    wanted = requests([None] * 3)
    clock.run_until_complete(load.run_window(Watching([[(0.1, 1)]] * 3), wanted, 2))
    assert seen == [False] * 3
    assert gc.isenabled()
    with pytest.raises(IndexError):  # no script for the fourth
        clock.run_until_complete(load.run_window(Watching([[(0.1, 1)]] * 3), requests([None] * 4), 2))
    assert gc.isenabled()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_load_runs_with_and_without_the_faster_loop(loop, monkeypatch):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setattr(load, "find_spec", lambda name: None)

    async def kind():
        return type(asyncio.get_running_loop()).__module__

    async def fail():
        raise ServerError("broken")

    assert load.run_loop(kind()).startswith(loop)
    with pytest.raises(ServerError, match="broken"):
        load.run_loop(fail())
