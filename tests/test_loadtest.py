"""The load test: its options, tiers and figures, and what counts as failed in scripted streams."""

import contextlib
import dataclasses
import http.server
import json
import os
import threading
import time
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # this process goes on with threads

from locust.env import Environment
from locust.exception import StopTest
from locust.runners import MasterRunner

from angelspec_client import Usage
from checks import free_ports
from loadtest import locustfile
from loadtest.records import Record
from loadtest.settings import Settings, SettingsError
from loadtest.task_sets import Prompt
from loadtest.tiers import Window, make_cell, schedule, to_line, users_at

OPTIONS = {
    "protocol": "http",
    "prompts": "a.jsonl, gsm8k",
    "seed": 3,
    "max_tokens": 8,
    "ignore_eos": False,
    "min_expected_tokens": 0,
    "temperature": 0.0,
    "drafter": "",
    "num_draft_tokens": -1,
    "request_timeout": 10.0,
    "tiers": "4,8,1",
    "tier_seconds": 20.0,
    "settle_seconds": 5.0,
    "results": "",
}


def settings(**options):
    return Settings.from_options(OPTIONS | options)


# Options


def test_options_become_settings():
    plain = settings()
    assert plain.tiers == (4, 8, 1)
    assert plain.prompts == ("a.jsonl", "gsm8k")
    assert (plain.drafter, plain.num_draft_tokens, plain.results) == (None, None, None)
    assert plain.min_expected_tokens == 1
    assert settings(ignore_eos=True).min_expected_tokens == 8
    assert settings(num_draft_tokens=0, drafter="none").request_options(4) == {
        "max_tokens": 8,
        "ignore_eos": False,
        "temperature": 0.0,
        "seed": 7,
        "drafter": "none",
        "num_draft_tokens": 0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": "4,x"}, "between commas, got 'x'"),
        ({"tiers": "0"}, "got '0'"),
        ({"tiers": " "}, "must not be empty"),
        ({"prompts": ","}, "must not be empty"),
        ({"max_tokens": 0}, "max-tokens must be at least 1, got 0"),
        ({"min_expected_tokens": 9}, "at most max-tokens, 8, got 9"),
        ({"tier_seconds": 0.5}, "tier-seconds must be at least 1"),
        ({"protocol": "smtp"}, "one of grpc, http, got 'smtp'"),
    ],
)
def test_values_that_are_not_allowed_are_named(options, message):
    with pytest.raises(SettingsError, match=message):
        settings(**options)


# Tiers


def test_tiers_follow_each_other_and_settle_before_they_are_measured():
    tiers = schedule(settings())
    assert [(tier.users, tier.start, tier.begin, tier.end) for tier in tiers] == [
        (4, 0.0, 5.0, 25.0),
        (8, 25.0, 30.0, 50.0),
        (1, 50.0, 55.0, 75.0),
    ]
    assert [users_at(tiers, second) for second in (0, 24.9, 25, 49.9, 74.9, 75)] == [4, 4, 8, 8, 1, None]


class IdleMaster(MasterRunner):
    """A master without workers, for what the shape asks it."""

    user_count = 0
    greenlet = None

    def __init__(self, environment):
        self.environment = environment


@pytest.fixture
def shape(tmp_path, monkeypatch):
    """The shape with a clock to be set: shape.clock."""
    prompts = tmp_path / "a.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    options = SimpleNamespace(**OPTIONS | {"prompts": str(prompts)})
    users = [locustfile.GrpcStreamUser, locustfile.HttpStreamUser]
    environment = SimpleNamespace(parsed_options=options, user_classes=users, process_exit_code=None)
    shape = locustfile.TierShape()
    shape.runner = SimpleNamespace(environment=environment, user_count=4)
    shape.reset_time()
    monkeypatch.setattr(shape, "get_run_time", lambda: shape.clock)
    return shape


def test_the_shape_walks_the_tiers_with_users_of_one_protocol(shape):
    seen = []
    for shape.clock in range(77):
        tick = shape.tick()
        assert tick is None or tick[2] == [locustfile.HttpStreamUser]
        seen.append(tick and tick[0])
    assert seen == [4] * 25 + [8] * 25 + [1] * 25 + [None] * 2
    shape.runner.environment.parsed_options.tiers = "2"  # changed in the web UI
    shape.clock = 0
    assert shape.tick()[0] == 4
    shape.reset_time()
    assert shape.tick()[0] == 2


def test_a_master_waits_for_the_last_reports_of_its_workers(shape):
    shape.runner = IdleMaster(shape.runner.environment)
    shape.runner.user_count = 1
    for shape.clock in range(78):
        shape.tick()
    assert shape.tick()[0] == 0
    shape.runner.user_count = 0
    shape.clock = 81
    assert shape.tick()[0] == 0
    shape.clock = 83
    assert shape.tick() is None


def test_wrong_options_end_the_test_and_are_logged(shape, caplog):
    shape.runner.environment.parsed_options.tiers = "x"
    shape.clock = 0
    assert shape.tick() is None
    assert shape.runner.environment.process_exit_code == 1
    assert "tiers must be positive numbers" in caplog.text


# Figures

USAGE = Usage("length", 5, 0, 1, 0, 0)


def record(sent, gaps_and_tokens, task="a", error=None, accepted=0, cut=False):
    """A request whose chunks come so long after each other."""
    arrivals, time_s = [], 0.0
    for gap, tokens in gaps_and_tokens:
        time_s += gap
        arrivals.append((time_s, tokens))
    total = sum(tokens for _, tokens in arrivals)
    usage = dataclasses.replace(
        USAGE, num_output_tokens=total, total_draft_tokens=2 * accepted, total_accepted_draft_tokens=accepted
    )
    return Record(task, sent, time_s, tuple(arrivals), None if cut else usage, error)


requests = st.builds(
    record,
    st.floats(90, 130),
    st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 4)), min_size=1, max_size=8),
    st.sampled_from("ab"),
    st.sampled_from([None, None, "it broke"]),
    cut=st.booleans(),
)


@examples(max_examples=40, deadline=None)
@given(st.lists(requests, max_size=12))
def test_figures_match_brute_force(records):
    window = Window(users=4, start=100.0, begin=105.0, end=125.0)
    cell = make_cell(window, records, settings(drafter="none"))
    tokens, answered, failed = 0, [], 0
    for each in records:
        tokens += sum(count for t, count in each.arrivals if 105 <= each.sent + t < 125)
        if each.sent >= 100 and 105 <= each.sent + each.duration_s < 125:
            failed += each.error is not None
            if each.error is None and each.usage is not None:
                answered.append(each)
    assert (cell["mode"], cell["concurrency"]) == ("ar", 4)
    assert (cell["output_tokens"], cell["requests"], cell["failed"]) == (tokens, len(answered), failed)
    assert cell["tokens_per_second"] == pytest.approx(tokens / 20)
    latencies = sorted(1000 * each.arrivals[-1][0] for each in answered)
    assert cell["latencies_ms"] == pytest.approx(latencies)
    if answered:
        for percent in (50, 90, 99):
            assert cell[f"p{percent}_ms"] == pytest.approx(np.percentile(latencies, percent))
    shares = cell["windows"][0]["by_task"].values()
    assert sum(share["output_tokens"] for share in shares) == tokens
    assert sum(share["request_seconds"] for share in shares) == pytest.approx(20 * cell["in_flight"])
    assert sum(task["requests"] for task in cell["by_task"].values()) == len(answered)
    json.loads(to_line(cell))


def test_throughput_is_of_all_tokens_that_arrived_and_latency_of_requests_of_the_tier():
    window = Window(users=2, start=100.0, begin=110.0, end=120.0)
    records = [
        record(95.0, [(16.0, 3), (2.0, 2)]),  # sent in the tier before: tokens only
        record(105.0, [(4.0, 1), (2.0, 4), (6.0, 8)], accepted=9),  # 1 token too early
        record(111.0, [(3.0, 1), (2.0, 4)], error="it broke"),
        record(118.0, [(1.0, 2), (4.0, 8)]),  # ends too late
        record(119.0, [(0.5, 1)], cut=True),
    ]
    cell = make_cell(window, records, settings())
    assert cell["output_tokens"] == 3 + 2 + 4 + 8 + 1 + 4 + 2 + 1
    assert (cell["requests"], cell["failed"], cell["error_rate"]) == (1, 1, 0.5)
    assert cell["p50_ms"] == cell["p99_ms"] == pytest.approx(12000.0)
    assert cell["ttft_p50_ms"] == pytest.approx(4000.0)
    # Four tokens share two seconds, eight share six.
    assert cell["itl_p50_ms"] == pytest.approx(np.median([500.0] * 4 + [750.0] * 8))
    assert cell["acceptance_length"] == pytest.approx(13 / 4)
    assert (cell["draft_tokens"], cell["accepted_draft_tokens"]) == (18, 9)
    assert cell["in_flight"] == pytest.approx((3.0 + 7.0 + 5.0 + 2.0 + 0.5) / 10.0)


def test_nothing_measured_is_null():
    line = json.loads(to_line(make_cell(Window(1, 0.0, 1.0, 2.0), [], settings())))
    assert line["p50_ms"] is line["ttft_p99_ms"] is None
    assert (line["mode"], line["requests"], line["error_rate"]) == ("default", 0, 0.0)


@examples(max_examples=40, deadline=None)
@given(requests)
def test_a_record_reaches_the_master_as_it_was(original):
    message = msgpack.unpackb(msgpack.packb(original.to_message()), strict_map_key=False)
    assert Record.from_message(message) == original


# Scripted streams


def event(text="x", ids=(1,), **fields):
    return {"text_output": text, "output_ids": list(ids), **fields}


def last(tokens, finish_reason="length", **fields):
    return {
        "finish_reason": finish_reason,
        "num_input_tokens": 5,
        "num_output_tokens": tokens,
        "seed": 1,
        "total_draft_tokens": 0,
        "total_accepted_draft_tokens": 0,
        **fields,
    }


@pytest.fixture
def scripted():
    """Plays a list of events, with pauses, to every request: scripted.events; and its address."""
    script = SimpleNamespace(events=[], bodies=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that has had enough
                for each in script.events:
                    time.sleep(0.03)
                    self.wfile.write(f"data: {json.dumps(each)}\n\n".encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        script.address = f"127.0.0.1:{server.server_port}"
        yield script
        server.shutdown()


@pytest.fixture
def user(scripted, monkeypatch):
    """A user of the scripted server; what it tells Locust is in user.told."""
    monkeypatch.setattr(locustfile, "PAUSE_AFTER_ERROR", 0.0)
    monkeypatch.setattr(locustfile, "LOAD_TEST", locustfile.LoadTest())
    load_test = locustfile.LOAD_TEST
    load_test.settings = settings()
    load_test.prompts = [Prompt("chat", [{"role": "user", "content": text}]) for text in "ab"]
    user = locustfile.HttpStreamUser(Environment())
    user.host = scripted.address
    user.told = []
    user.environment.events.request.add_listener(lambda **fields: user.told.append(fields))
    user.on_start()
    yield user
    user.on_stop()


def test_an_answer_is_reported_in_total_to_its_first_token_and_between_tokens(user, scripted):
    scripted.events = [event("", ()), event(ids=(1, 2)), event(ids=(3, 4, 5)), event(ids=(6,), **last(6))]
    user.generate()
    total, first, *gaps = user.told
    assert {told["request_type"] for told in user.told} == {"HTTP"}
    assert {told["context"]["task"] for told in user.told} == {"chat"}
    assert not any(told["exception"] for told in user.told)
    assert (total["name"], total["response_length"]) == ("total", 6)
    assert (first["name"], first["response_length"]) == ("time to first token", 0)
    assert {gap["name"] for gap in gaps} == {"inter-token latency"}
    times = [gap["response_time"] for gap in gaps]
    assert len(times) == 4  # the tokens of the first chunk have no gap
    assert times[0] == times[1] == times[2]
    assert first["response_time"] >= 60
    assert first["response_time"] + sum(times) == pytest.approx(total["response_time"], abs=20)
    assert user.environment.events is not None
    (kept,) = locustfile.LOAD_TEST.records
    assert kept.answered
    assert [tokens for _, tokens in kept.arrivals] == [0, 2, 3, 1]


def test_requests_walk_the_prompts_and_their_seeds(user, scripted):
    scripted.events = [event(**last(1))]
    for _ in range(3):
        user.generate()
    contents = [json.loads(body["messages"])[0]["content"] for body in scripted.bodies]
    assert contents == ["a", "b", "a"]
    assert [body["seed"] for body in scripted.bodies] == [3, 4, 5]
    assert not {"drafter", "num_draft_tokens"} & scripted.bodies[0].keys()


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event(), {"error": "INTERNAL: the target failed"}], "ServerError: .*the target failed"),
        ([{"error": "UNAVAILABLE: 256 requests are waiting"}], "ServerBusy"),
        ([event(), event()], "ServerError"),  # it just ends
        ([event(**last(1, "cancelled"))], "ended with 'cancelled', allowed: length, stop, eos"),
        ([event(ids=(), **last(0, "eos"))], "has 0 tokens, at least 1 were expected"),
        ([event(), event(**last(3))], "2 tokens arrived, the server counted 3"),
    ],
)
def test_a_stream_that_does_not_end_well_counts_as_failed(user, scripted, events, message):
    scripted.events = events
    user.generate()
    (told,) = user.told
    assert told["name"] == "total"
    with pytest.raises(locustfile.RequestFailed, match=message):
        raise told["exception"]
    (kept,) = locustfile.LOAD_TEST.records
    assert not kept.answered
    assert kept.error == str(told["exception"])


def test_with_ignore_eos_every_answer_must_have_its_full_length(user, scripted):
    locustfile.LOAD_TEST.settings = settings(ignore_eos=True, max_tokens=3)
    for ends in (last(2), last(2, "eos"), last(3)):
        scripted.events = [event(ids=range(ends["num_output_tokens"]), **ends)]
        user.generate()
    assert [record.error for record in locustfile.LOAD_TEST.records] == [
        "the answer has 2 tokens, at least 3 were expected",
        "the answer ended with 'eos', allowed: length",
        None,
    ]


def test_a_server_that_is_not_there_counts_as_failed(user):
    user.host = f"127.0.0.1:{free_ports(1)[0]}"
    user.on_start()
    user.generate()
    (told,) = user.told
    assert "ConnectionFailed" in str(told["exception"])


def test_a_user_that_is_stopped_leaves_what_has_arrived(user, scripted, monkeypatch):
    scripted.events = [event()] * 100
    monkeypatch.setattr(locustfile, "fault", None)
    seen = []

    def stop_after_three(stream):
        for _ in zip(range(3), stream, strict=False):
            pass
        seen.append(stream)
        raise StopTest

    monkeypatch.setattr("angelspec_client.Stream.read", stop_after_three)
    with pytest.raises(StopTest):
        user.generate()
    (kept,) = locustfile.LOAD_TEST.records
    assert len(kept.arrivals) == 3
    assert not kept.answered
    assert kept.error is None
    assert user.told == []
    seen[0].close()
