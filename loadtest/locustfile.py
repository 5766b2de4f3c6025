"""Users of Locust that stream answers of a language model, and tiers of more and more of them.

    locust -f loadtest/locustfile.py --headless --drafter ngram --results locust.jsonl

Closed loop: a user sends its next request when the last one has ended.  README.md says how to run it.
"""

from __future__ import annotations

import functools
import sys
import time
from argparse import ArgumentParser
from typing import Any

import grpc.experimental.gevent
from locust import LoadTestShape, User, argument_parser, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from angelspec_client import AngelSpecError, GrpcClient, HttpClient, Stream
from angelspec_client.client import Client
from angelspec_client.metrics import token_gaps
from loadtest.load_test import LoadTest
from loadtest.records import Record, fault
from loadtest.settings import SERVERS, Settings, add_options
from loadtest.tiers import Tier, schedule, users_at

PAUSE_AFTER_ERROR = 1.0  # seconds; else users of a server that is down would do nothing but fail
LAST_REPORTS = 5.0  # seconds that a master waits after the last tier; workers report every three
SPAWN_RATE = 100.0  # users per second, the highest that Locust does not warn of
LOAD_TEST = LoadTest()


class RequestFailed(Exception):
    """A request that counts as failed; the text says why."""


class StreamUser(User):
    """Sends one request after the other."""

    abstract = True
    protocol: str
    client_type: type[GrpcClient] | type[HttpClient]
    client: Client  # of this user's own

    def on_start(self) -> None:
        self.client = self.client_type(
            self.host or SERVERS[self.protocol], timeout=settings().request_timeout
        )

    def on_stop(self) -> None:
        self.client.close()

    @task
    def generate(self) -> None:
        """One request: streamed, checked, kept, and reported to Locust."""
        number, prompt = LOAD_TEST.next_request()
        sent, start = time.time(), time.perf_counter()
        stream: Stream | None = None
        error = None
        try:
            stream = self.client.stream(messages=prompt.messages, **settings().request_options(number))
            error = fault(stream.read(), settings())
        except AngelSpecError as found:
            error = f"{type(found).__name__}: {found}"
        finally:
            # Also when this user is stopped meanwhile: throughput is of all tokens that have arrived.
            seconds = time.perf_counter() - start
            record = Record.of(prompt.task, sent, seconds, stream.chunks if stream else (), error)
            LOAD_TEST.records.append(record)
        self.report(record)
        if error is not None:
            time.sleep(PAUSE_AFTER_ERROR)

    def report(self, record: Record) -> None:
        """Tell Locust of the request, and of the first token and the gaps of an answer without error."""
        context = {**self.context(), "task": record.task}

        def fire(name: str, seconds: float, tokens: int = 0, error: Exception | None = None) -> None:
            self.environment.events.request.fire(
                request_type=self.protocol.upper(),
                name=name,
                response_time=1000.0 * seconds,
                response_length=tokens,
                exception=error,
                context=context,
            )

        error = None if record.error is None else RequestFailed(record.error)
        fire("total", record.duration_s, sum(tokens for _, tokens in record.arrivals), error)
        if error is None:
            generation = record.generation()
            fire("time to first token", generation.ttft_s)
            for gap in token_gaps(generation.chunks).tolist():
                fire("inter-token latency", gap)


class GrpcStreamUser(StreamUser):
    """Over gRPC: a bidirectional stream per request, on a channel of the user's own."""

    protocol = "grpc"
    client_type = GrpcClient


class HttpStreamUser(StreamUser):
    """Over HTTP: server-sent events of generate_stream."""

    protocol = "http"
    client_type = HttpClient


class TierShape(LoadTestShape):
    """Walks the tiers of the settings, each with users of the chosen protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.began = 0.0  # seconds since the epoch
        self.tiers: list[Tier] = []
        self.last_busy = 0.0  # seconds since the test began

    def reset_time(self) -> None:
        super().reset_time()
        self.began = time.time()
        self.tiers = []  # the options may have changed in the web UI
        self.last_busy = 0.0

    def tick(self) -> tuple[int, float, list[type[User]]] | None:
        assert self.runner is not None
        environment = self.runner.environment
        if not (self.tiers or prepare(environment)):
            environment.process_exit_code = 1
            return None
        self.tiers = self.tiers or schedule(settings())
        seconds = self.get_run_time()
        users = users_at(self.tiers, seconds)
        if self.runner.user_count:
            self.last_busy = seconds
        if users is None:
            if not isinstance(self.runner, MasterRunner) or seconds > self.last_busy + LAST_REPORTS:
                return None
            users = 0
        classes = [each for each in environment.user_classes if protocol_of(each) == settings().protocol]
        return users, SPAWN_RATE, classes


def settings() -> Settings:
    """The settings of the running test."""
    assert LOAD_TEST.settings is not None
    return LOAD_TEST.settings


def protocol_of(user_class: type[User]) -> str:
    """grpc or http; the only users here are those above."""
    assert issubclass(user_class, StreamUser)
    return user_class.protocol


def prepare(environment: Environment) -> bool:
    """Read the options as they are now; False when they are wrong, which has been logged."""
    return LOAD_TEST.prepare(vars(environment.parsed_options))


@events.init_command_line_parser.add_listener
def on_options(parser: ArgumentParser, **_: Any) -> None:
    add_options(parser)


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    # Not earlier: with --processes this process was forked meanwhile.
    grpc.experimental.gevent.init_gevent()
    # A worker asks for this once per option at every change of tier, and each time all options are built
    # anew: together that stops its streams for a second, on a busy machine until the master gives it up.
    argument_parser.default_args_dict = functools.cache(argument_parser.default_args_dict)
    protocols = {protocol_of(each) for each in environment.user_classes}
    if len(protocols) == 1:  # the command line names a user class
        vars(environment.parsed_options)["protocol"] = protocols.pop()
    if not prepare(environment):
        sys.exit(1)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    # A worker has the master's options from now on; elsewhere the shape has read them.
    if isinstance(environment.runner, WorkerRunner) and not prepare(environment):
        environment.runner.quit()
    LOAD_TEST.begin(getattr(environment.runner, "worker_index", 0))


@events.report_to_master.add_listener
def on_report(data: dict[str, Any], **_: Any) -> None:
    LOAD_TEST.report(data)


@events.worker_report.add_listener
def on_worker_report(data: dict[str, Any], **_: Any) -> None:
    LOAD_TEST.receive(data)


@events.test_stop.add_listener
def on_test_stop(environment: Environment, **_: Any) -> None:
    if isinstance(environment.shape_class, TierShape) and not isinstance(environment.runner, WorkerRunner):
        LOAD_TEST.finish(environment.shape_class.began, time.time())
