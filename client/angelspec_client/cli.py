"""The command ``angelspec``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from angelspec_client import errors
from angelspec_client.client import Client
from angelspec_client.grpc_client import DEFAULT_SERVER, GrpcClient
from angelspec_client.results import Generation
from angelspec_client.stream import Stream

EXIT_CODES: dict[type[errors.AngelSpecError], int] = {
    errors.ServerError: 1,
    errors.InvalidRequest: 2,
    errors.ConnectionFailed: 3,
    errors.ServerBusy: 4,
    errors.RequestTimeout: 5,
    errors.RequestCancelled: 130,
}
_EXIT_HELP = (
    "Exit codes: 1 the server failed, 2 wrong request or usage, 3 no connection, 4 the server is busy, "
    "5 timeout, 130 cancelled."
)

app = typer.Typer(
    name="angelspec",
    help="Talk to an angelspec server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Server = Annotated[
    str, typer.Option(envvar="ANGELSPEC_SERVER", metavar="HOST:GRPC_PORT", help="Where the server listens.")
]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds the whole answer may take.")]


@app.callback()
def main() -> None:
    """Talk to an angelspec server."""


@app.command(epilog=_EXIT_HELP)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    server: Server = DEFAULT_SERVER,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show the text as it comes.")] = True,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="As a chat message through the chat template, or as it is.")
    ] = True,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter by name; 'none' turns speculation off.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Draft tokens per step; 0: off.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0: off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1: off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0: off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be given several times.")] = None,
    timeout: Timeout = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print figures to standard error.")] = False,
) -> None:
    """Generate text.  Ctrl-C cancels on the server too."""
    text = sys.stdin.read() if prompt == "-" else prompt
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
    }
    with _client(server, timeout) as client:
        if stream:
            generation = _show(client.stream(**source, **options))
        else:
            generation = client.generate(**source, **options)
            typer.echo(generation.text)
    if stats:
        _print_stats(generation)
    if generation.finish_reason not in ("stop", "eos", "length"):
        _fail(f"the answer is not complete: {generation.finish_reason}", 1)


@app.command(epilog=_EXIT_HELP)
def health(server: Server = DEFAULT_SERVER, timeout: Timeout = 10.0) -> None:
    """Check that the server serves, by generating one token."""
    with _client(server, timeout) as client:
        generation = client.health(timeout=timeout)
    typer.echo(f"ok: {server} generated a token in {1000 * generation.duration_s:.0f} ms")


@contextmanager
def _client(server: str, timeout: float | None) -> Iterator[Client]:
    """A client whose errors end the command with a readable line."""
    try:
        with GrpcClient(server, timeout=timeout) as client:
            yield client
    except errors.AngelSpecError as error:
        _fail(str(error), next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind)))
    except KeyboardInterrupt:
        _fail("cancelled", EXIT_CODES[errors.RequestCancelled])


def _show(stream: Stream) -> Generation:
    shown = False
    try:
        with stream:
            for chunk in stream:
                typer.echo(chunk.text, nl=False)
                sys.stdout.flush()
                shown = True
    finally:
        if shown:
            typer.echo()
    return stream.generation


def _print_stats(generation: Generation) -> None:
    seconds = generation.duration_s
    rate = generation.num_output_tokens / seconds
    Console(stderr=True, highlight=False).print(
        f"{generation.num_input_tokens} prompt + {generation.num_output_tokens} output tokens, "
        f"{generation.finish_reason}, {seconds:.2f} s, {rate:.1f} tokens/s, "
        f"first after {1000 * generation.ttft_s:.0f} ms; "
        f"{generation.total_accepted_draft_tokens} of {generation.total_draft_tokens} draft tokens accepted, "
        f"acceptance length {generation.acceptance_length:.2f}; seed {generation.seed}",
        soft_wrap=True,
        markup=False,
    )


def _fail(message: str, exit_code: int) -> None:
    typer.echo(f"angelspec: {message}", err=True)
    raise typer.Exit(exit_code)
