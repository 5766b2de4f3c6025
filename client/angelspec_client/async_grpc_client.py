"""Client over gRPC streams for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from angelspec_client.async_client import AsyncClient
from angelspec_client.client import DEFAULT_MODEL
from angelspec_client.errors import RequestCancelled, unreachable
from angelspec_client.grpc_client import CHANNEL_OPTIONS, DEFAULT_SERVER, decode, encode, from_rpc_error
from angelspec_client.progress import Response
from angelspec_client.protocol import Request


class AsyncGrpcClient(AsyncClient):
    """Client over gRPC for asyncio.  Arguments as GrpcClient."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        retries: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        super().__init__(model, timeout, retries)
        self._server = server
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(server, credentials, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Close the channel, which cancels what is running on it."""
        await self._channel.close()

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

    async def receive(self) -> Response | None:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._server) from None
        except asyncio.CancelledError:
            # grpc.aio reports a cancelled call like a cancelled task.
            if self._closed or (self._call.cancelled() and not _task_cancelled()):
                raise RequestCancelled("the request was cancelled by this client") from None
            raise
        if response is grpc.aio.EOF:
            return None
        arrived_at = time.perf_counter()
        outputs = decode(response, self._received)
        self._received = True
        return outputs, arrived_at

    async def arrive(self) -> tuple[()]:
        """Nothing: gRPC has to be asked for each response."""
        return ()

    def close(self) -> None:
        self._closed = True
        self._call.cancel()


async def _only(message: Any) -> AsyncIterator[Any]:
    yield message


def _task_cancelled() -> bool:
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0  # Python 3.10 cannot tell
