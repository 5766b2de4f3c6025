"""Client of an angelspec server, over gRPC and HTTP.

with GrpcClient("127.0.0.1:8001") as client:
    print(client.generate("Once upon a time", max_tokens=32).text)
    for chunk in client.stream(messages=[{"role": "user", "content": "Hello"}]):
        print(chunk.text, end="", flush=True)
"""

from angelspec_client.async_grpc_client import AsyncGrpcClient
from angelspec_client.async_http_client import AsyncHttpClient
from angelspec_client.async_stream import AsyncStream
from angelspec_client.errors import (
    AngelSpecError,
    ConnectionFailed,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerBusy,
    ServerError,
)
from angelspec_client.grpc_client import GrpcClient
from angelspec_client.http_client import HttpClient
from angelspec_client.options import Options
from angelspec_client.results import Chunk, Generation, Usage
from angelspec_client.stream import Stream

__all__ = [
    "AngelSpecError",
    "AsyncGrpcClient",
    "AsyncHttpClient",
    "AsyncStream",
    "Chunk",
    "ConnectionFailed",
    "Generation",
    "GrpcClient",
    "HttpClient",
    "InvalidRequest",
    "Options",
    "RequestCancelled",
    "RequestTimeout",
    "ServerBusy",
    "ServerError",
    "Stream",
    "Usage",
]
