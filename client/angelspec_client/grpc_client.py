"""Client over gRPC streams.

Every request is a call of its own on one shared channel.  ``InferenceServerClient`` of tritonclient
allows one stream at a time and loses which request an error belongs to, so its generated stub is used
directly.

Under gevent call ``grpc.experimental.gevent.init_gevent()`` before the first client is made.
"""

from __future__ import annotations

import time
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput, service_pb2, service_pb2_grpc
from tritonclient.utils import triton_to_np_dtype

from angelspec_client.client import DEFAULT_MODEL, Client
from angelspec_client.errors import (
    AngelSpecError,
    from_grpc_status,
    from_message,
    unreachable,
)
from angelspec_client.progress import Response
from angelspec_client.protocol import Outputs, Request, to_tensors

DEFAULT_SERVER = "127.0.0.1:8001"

CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class GrpcClient(Client):
    """Synchronous client over gRPC.

    server: host:port.  timeout: seconds for a whole request, None for no limit.  retries: how often a
    busy server is asked again, while nothing was received.  credentials: for TLS.
    """

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
            self._channel = grpc.insecure_channel(server, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(server, credentials, options=CHANNEL_OPTIONS)

    def close(self) -> None:
        """Close the channel, which cancels what is running on it."""
        self._channel.close()

    def _connect(self, request: Request, timeout_s: float | None) -> _GrpcCall:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        message = encode(request, self._model)
        try:
            call = stub.ModelStreamInfer(iter((message,)), timeout=timeout_s)
        except ValueError:  # gRPC's way to say that the channel is closed
            raise unreachable(self._server, "this client is closed") from None
        return _GrpcCall(call, self._server)


class _GrpcCall:
    def __init__(self, call: Any, server: str) -> None:
        self._call = call
        self._server = server
        self._received = False

    def receive(self) -> Response | None:
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._server) from None
        if response is None:
            return None
        arrived_at = time.perf_counter()
        outputs = decode(response, self._received)
        self._received = True
        return outputs, arrived_at

    def close(self) -> None:
        self._call.cancel()


def encode(request: Request, model: str) -> Any:
    """The ModelInferRequest of a request."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    for tensor in to_tensors(request):
        infer_input = InferInput(tensor.name, list(tensor.array.shape), tensor.datatype)
        infer_input.set_data_from_numpy(tensor.array)
        message.inputs.append(infer_input._get_tensor())
        message.raw_input_contents.append(infer_input._get_content())
    for name, value in request.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(
            type(value), "string_param"
        )
        setattr(message.parameters[name], kind, value)
    return message


def decode(response: Any, received: bool) -> Outputs:
    """The outputs of a ModelStreamInferResponse; received: it is not the first of its request.

    Raises:
        AngelSpecError: the response is an error.
    """
    if response.error_message:
        raise from_message(response.error_message, received)
    answer = response.infer_response
    contents = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return {output.name: _read_tensor(output.datatype, content) for output, content in contents}


def _read_tensor(datatype: str, content: bytes) -> list[Any]:
    """The values of a tensor.  InferResult does the same for arrays of any shape, at five times the cost."""
    if datatype != "BYTES":
        return np.frombuffer(content, triton_to_np_dtype(datatype)).tolist()
    texts, at = [], 0
    while at < len(content):
        begin = at + 4
        at = begin + int.from_bytes(content[at:begin], "little")
        texts.append(content[begin:at].decode("utf-8", "replace"))
    return texts


def from_rpc_error(error: Any, server: str) -> AngelSpecError:
    """The error for a grpc.RpcError."""
    return from_grpc_status(error.code().name, error.details() or "", server)
