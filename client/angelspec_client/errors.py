"""What can go wrong, as types, and how the server's answers map to them.

Triton hands most errors of a model over as text alone: in a gRPC stream always, over HTTP with status
400 whatever the error was, or 200 once a stream has begun.  So the text decides: a leading status name
("UNAVAILABLE: …") if there is one, else a few well-known phrases, else whether the request was already
being served.  Triton's header ``triton_grpc_error`` would give gRPC streams a real status, but
tritonserver 2.51 crashes when several such streams fail at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class AngelSpecError(Exception):
    """Base of every error of the client; the text says what was wrong and is fit to be shown."""


class InvalidRequest(AngelSpecError):
    """The request is wrong: a value, a name, a model.  The same request will fail again."""


class ServerBusy(AngelSpecError):
    """The server cannot take a request now: its queue is full, it is starting or it is stopping."""


class ServerError(AngelSpecError):
    """The server failed, or its answer makes no sense."""


class ConnectionFailed(AngelSpecError):
    """The server cannot be reached, or the connection broke."""


class RequestCancelled(AngelSpecError):
    """The request was cancelled, by this client or by the server."""


class RequestTimeout(AngelSpecError):
    """The client's timeout passed before the answer was complete."""


_BY_STATUS: Mapping[str, type[AngelSpecError]] = {
    "INVALID_ARG": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "UNSUPPORTED": InvalidRequest,
    "UNAVAILABLE": ServerBusy,
    "CANCELLED": RequestCancelled,
    "INTERNAL": ServerError,
    "UNKNOWN": ServerError,
}
_STATUS_PREFIX = re.compile("|".join(_BY_STATUS))
_BUSY = re.compile(r"queue( is)? full|maximum queue size|not ready|stopping|shutting down|draining", re.I)
_FAILED = re.compile(r"stub process|not healthy|not configured|failed|internal", re.I)


def from_message(message: str, received: bool) -> AngelSpecError:
    """The error for a text without a status; received: whether the request had brought a response before."""
    prefix = _STATUS_PREFIX.match(message)
    if prefix and message.startswith(": ", prefix.end()):
        return _BY_STATUS[prefix[0]](message)
    if _BUSY.search(message):
        return ServerBusy(message)
    if received or _FAILED.search(message):
        return ServerError(message)
    return InvalidRequest(message)


def from_http_status(status: int, message: str) -> AngelSpecError:
    """The error for an HTTP answer; with status 200 it came after the answer had begun."""
    if status == 503:
        return ServerBusy(message)
    if status >= 500 and status != 501:
        return ServerError(message)
    return from_message(message, received=status == 200)


def from_grpc_status(status: str, message: str, server: str) -> AngelSpecError:
    """The error for a call that gRPC itself ended, with a status such as "UNAVAILABLE"."""
    if status == "UNAVAILABLE":
        # gRPC wraps the cause: "failed to connect to all addresses; last error: …: Connection refused".
        return unreachable(server, message.rpartition(": ")[2].rstrip("]") or "unavailable")
    if status == "DEADLINE_EXCEEDED":
        return RequestTimeout(f"no complete answer from {server} within the timeout")
    if status == "CANCELLED":
        return RequestCancelled(message)
    return ServerError(message or f"the server answered {status}")


def unreachable(server: str, detail: object) -> ConnectionFailed:
    """The error for a server that cannot be reached, or no longer."""
    return ConnectionFailed(f"no connection to the server at {server}: {detail}")
