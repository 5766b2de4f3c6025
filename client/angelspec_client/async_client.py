"""Client over gRPC streams for asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from angelspec_client.async_stream import AsyncStream
from angelspec_client.client import DEFAULT_MODEL
from angelspec_client.errors import RequestCancelled, unreachable
from angelspec_client.grpc_client import CHANNEL_OPTIONS, DEFAULT_SERVER, decode, encode, from_rpc_error
from angelspec_client.options import Options
from angelspec_client.progress import Policy
from angelspec_client.protocol import Messages, Outputs, Request, build_request
from angelspec_client.results import Generation

if TYPE_CHECKING:
    from typing import Self


class AsyncGrpcClient:
    """Client over gRPC for asyncio; make it and use it inside one event loop.  Arguments as GrpcClient."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        retries: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._server = server
        self._model = model
        self._policy = Policy(timeout, retries)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(server, credentials, options=CHANNEL_OPTIONS)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Generation:
        """Generate, and wait for all of it.  As Client.generate."""
        request = build_request(prompt, messages, input_ids, False, Options(**options))
        async with self._start(request, timeout) as stream:
            return await stream.read()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncStream:
        """Generate, and iterate over the chunks as they come.  As Client.stream."""
        return self._start(build_request(prompt, messages, input_ids, True, Options(**options)), timeout)

    async def close(self) -> None:
        """Close the channel, which cancels what is running on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _start(self, request: Request, timeout: float | None) -> AsyncStream:
        policy = self._policy if timeout is None else dataclasses.replace(self._policy, timeout_s=timeout)
        return AsyncStream(lambda remaining_s: self._connect(request, remaining_s), policy)

    def _connect(self, request: Request, timeout_s: float | None) -> _AsyncGrpcCall:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        message = encode(request, self._model)
        try:
            call = stub.ModelStreamInfer(_only(message), timeout=timeout_s)
        except grpc.aio.UsageError:
            raise unreachable(self._server, "this client is closed") from None
        return _AsyncGrpcCall(call, self._server)


class _AsyncGrpcCall:
    def __init__(self, call: Any, server: str) -> None:
        self._call = call
        self._server = server
        self._received = False
        self._closed = False

    async def receive(self) -> Outputs | None:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._server) from None
        except asyncio.CancelledError:
            # grpc.aio reports a cancelled call like a cancelled task.
            if self._closed or (self._call.cancelled() and not _task_cancelled()):
                raise RequestCancelled("the request was cancelled by this client") from None
            raise
        outputs = None if response is grpc.aio.EOF else decode(response, self._received)
        self._received = True
        return outputs

    def close(self) -> None:
        self._closed = True
        self._call.cancel()


async def _only(message: Any) -> AsyncIterator[Any]:
    yield message


def _task_cancelled() -> bool:
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0  # Python 3.10 cannot tell
