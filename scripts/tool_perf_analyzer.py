"""perf_analyzer: its input file, its command, and its export of every request.

Its own report counts responses, not tokens, and its measured time ends at a whole second, so its
requests per second are up to one second's worth too low.  The export has each response with its time and
its outputs: these are read as our client reads them, and give the same figures by the same definitions.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from angelspec_client import Generation, ServerError
from angelspec_client.options import Options
from angelspec_client.protocol import build_request, read_chunk, read_json
from angelspec_client.results import assemble
from load import Request, check_whole
from tool_runs import Measured, ToolError, from_generations, run_tool

EXPORT, REPORT, INPUTS, LOG = "export.json", "report.csv", "inputs.json", "perf_analyzer.log"


def make_inputs(requests: Sequence[Request]) -> dict[str, Any]:
    """The content of the file for --input-data: the tensors of every request, each a list."""
    entries = []
    for request in requests:
        fields = build_request(None, request.prompt, None, True, Options(**request.options)).fields
        entries.append(
            {name: value if isinstance(value, list) else [value] for name, value in fields.items()}
        )
    return {"data": entries}


def make_command(program: str, server: str, folder: Path, requests: int, concurrency: int) -> list[str]:
    """The command line: so many requests over gRPC streams, so many in flight.

    program: how perf_analyzer is called, arguments included.  server: host:port.
    """
    return [
        *shlex.split(program),
        *("-m", "angelspec", "-i", "grpc", "-u", server, "--async", "--streaming"),
        *("--input-data", str(folder / INPUTS)),
        *("--concurrency-range", f"{concurrency}:{concurrency}"),
        *("--request-count", str(requests)),
        *("--profile-export-file", str(folder / EXPORT)),
        *("-f", str(folder / REPORT)),
    ]


def measure(
    program: str, server: str, folder: Path, requests: Sequence[Request], concurrency: int, timeout_s: float
) -> Measured:
    """Send the requests with perf_analyzer.  folder: for its files.

    Raises:
        ToolError: it fails, which it also does when the server refuses a request.
    """
    (folder / INPUTS).write_text(json.dumps(make_inputs(requests)), encoding="utf-8")
    run_tool(make_command(program, server, folder, len(requests), concurrency), folder / LOG, timeout_s)
    try:
        export = json.loads((folder / EXPORT).read_text(encoding="utf-8", errors="replace"))
        report = (folder / REPORT).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ToolError(f"perf_analyzer wrote no readable export: {error}") from None
    return parse(export, report, requests[0])


def parse(export: Mapping[str, Any], report: str, like: Request) -> Measured:
    """The figures out of the export and the CSV report of a run.

    like: a request that was sent; all ask for the same number of tokens.

    Raises:
        ToolError: they are not what perf_analyzer writes.
    """
    try:
        (experiment,) = export["experiments"]
        sent = experiment["requests"]
        start = min(request["timestamp"] for request in sent)
        end = max(request["response_timestamps"][-1] for request in sent)
        generations, errors = [], []
        for request in sent:
            try:
                generation = read_generation(request)
                check_whole(generation, like)
                generations.append(generation)
            except ServerError as error:
                errors.append(error)
        (row,) = csv.DictReader(report.splitlines())
        stated = {
            "requests_per_second": float(row["Inferences/Second"]),
            "p50_ms": float(row["p50 latency"]) / 1000,
            "p99_ms": float(row["p99 latency"]) / 1000,
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ToolError(f"perf_analyzer's export is not as expected: {error!r}") from None
    return from_generations(generations, errors, 1e-9 * (end - start), stated)


def read_generation(request: Mapping[str, Any]) -> Generation:
    """One request of the export.

    Raises:
        ServerError: its last response does not say how it ended.
    """
    chunks = []
    for time_ns, outputs in zip(request["response_timestamps"], request["response_outputs"], strict=True):
        # An output that a response lacks is "" there, and a text may be "".
        present = {name: value for name, value in outputs.items() if value != "" or name == "text_output"}
        chunks.append(read_chunk(read_json(present), 1e-9 * (time_ns - request["timestamp"])))
    if not chunks or chunks[-1].usage is None:
        raise ServerError("the stream ended early")
    return assemble(tuple(chunks))
