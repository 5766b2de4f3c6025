"""AIPerf: its input file, its command, and its exports.

It speaks HTTP: the raw endpoint sends our bodies as they are to generate_stream.  It counts output tokens
by tokenizing the text, so that tokens without a text of their own (an end of text that is ignored) are
missing, and it counts streams that end in an error event or with finish_reason timeout as successes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from angelspec_client.options import Options
from angelspec_client.protocol import build_request, to_json
from load import Request
from tool_runs import Measured, ToolError, run_tool

INPUTS, LOG, ARTIFACTS = "inputs.json", "aiperf.log", "artifacts"
SUMMARY, RECORDS = "profile_export_aiperf.json", "profile_export.jsonl"
ENDPOINT = "/v2/models/angelspec/generate_stream"
_STATED = (  # our name, AIPerf's, and which of its figures; it leaves out those without values
    ("tokens_per_second", "output_token_throughput", "avg"),
    ("requests_per_second", "request_throughput", "avg"),
    ("p50_ms", "request_latency", "p50"),
    ("p99_ms", "request_latency", "p99"),
    ("ttft_p50_ms", "time_to_first_token", "p50"),
    ("itl_p50_ms", "inter_token_latency", "p50"),
)


def make_inputs(requests: Sequence[Request]) -> dict[str, Any]:
    """The content of the file for --input-file: a session per request, its body as it is sent."""
    return {
        "data": [
            {
                "session_id": str(request.number),
                "payloads": [
                    json.loads(
                        to_json(build_request(None, request.prompt, None, True, Options(**request.options)))
                    )
                ],
            }
            for request in requests
        ]
    }


def make_command(
    program: str, server: str, tokenizer: Path, folder: Path, requests: int, concurrency: int
) -> list[str]:
    """The command line: so many requests over HTTP, so many in flight.

    program: how aiperf is called, arguments included.  server: host:port.  tokenizer: a folder.
    """
    return [
        *shlex.split(program),
        *("profile", "-m", "angelspec", "--url", f"http://{server}"),
        *("--endpoint-type", "raw", "--custom-endpoint", ENDPOINT, "--streaming"),
        *("--extra-inputs", "response_field:text_output"),
        *("--input-file", str(folder / INPUTS), "--custom-dataset-type", "inputs-json"),
        *("--dataset-sampling-strategy", "sequential"),
        *("--concurrency", str(concurrency), "--request-count", str(requests)),
        *("--tokenizer", str(tokenizer.resolve())),
        *("--output-artifact-dir", str(folder / ARTIFACTS)),
        *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]


def measure(
    program: str,
    server: str,
    tokenizer: Path,
    folder: Path,
    requests: Sequence[Request],
    concurrency: int,
    timeout_s: float,
) -> Measured:
    """Send the requests with AIPerf.  folder: for its files.

    Raises:
        ToolError: it fails, which it also does when no request succeeds.
    """
    shutil.rmtree(folder / ARTIFACTS, ignore_errors=True)
    (folder / INPUTS).write_text(json.dumps(make_inputs(requests)), encoding="utf-8")
    # With HF_HUB_OFFLINE it looks for the folder in the cache of the hub.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = make_command(program, server, tokenizer, folder, len(requests), concurrency)
    run_tool(command, folder / LOG, timeout_s, env)
    try:
        summary = json.loads((folder / ARTIFACTS / SUMMARY).read_text(encoding="utf-8"))
        lines = (folder / ARTIFACTS / RECORDS).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise ToolError(f"aiperf wrote no readable export: {error}") from None
    return parse(summary, records)


def parse(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Measured:
    """The figures out of the summary and of the records, one per request.

    Raises:
        ToolError: they are not what AIPerf writes.
    """
    good = [record["metrics"] for record in records if not record.get("error")]
    errors = [record["error"] for record in records if record.get("error")]

    def values(name: str) -> np.ndarray:
        return np.array([float(metrics[name]["value"]) for metrics in good if name in metrics])

    try:
        return Measured(
            requests=len(records),
            failed=len(errors),
            output_tokens=int(summary["total_output_tokens"]["avg"]),
            duration_s=float(summary["benchmark_duration"]["avg"]),
            latency_ms=values("request_latency"),
            ttft_ms=values("time_to_first_token"),
            tpot_ms=values("inter_token_latency"),
            first_error=str(errors[0].get("message", errors[0])).strip() if errors else None,
            stated={
                name: float(summary[metric][kind]) for name, metric, kind in _STATED if metric in summary
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ToolError(f"aiperf's export is not as expected: {error!r}") from None
