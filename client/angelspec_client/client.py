"""What the synchronous clients share: generate, stream and health over any transport."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from angelspec_client.options import Options
from angelspec_client.progress import Call, Policy
from angelspec_client.protocol import Messages, Request, build_request
from angelspec_client.results import Generation
from angelspec_client.stream import Stream

if TYPE_CHECKING:
    from typing import Self

DEFAULT_MODEL = "angelspec"


class Client(ABC):
    """A client of one server.  May be used from several threads."""

    def __init__(self, model: str, timeout: float | None, retries: int) -> None:
        self._model = model
        self._policy = Policy(timeout, retries)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Generation:
        """Generate, and wait for all of it; the answer comes in one piece.

        Exactly one of prompt (text), messages (for the chat template: [{"role": …, "content": …}]) and
        input_ids (token ids) is given.  timeout is in seconds and replaces the client's.  options are
        the fields of Options.

        Raises:
            AngelSpecError: one of the types in errors.
        """
        request = build_request(prompt, messages, input_ids, False, Options(**options))
        with self._start(request, timeout) as stream:
            return stream.read()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Stream:
        """Generate, and iterate over the chunks as they come.  Takes what generate takes.

        Raises:
            InvalidRequest: the request cannot be sent.  Everything else is raised by the iterator.
        """
        return self._start(build_request(prompt, messages, input_ids, True, Options(**options)), timeout)

    def health(self, timeout: float | None = 10.0) -> Generation:
        """Prove that the server serves, by generating one token.

        Raises:
            AngelSpecError: it does not.
        """
        return self.generate("Hello", max_tokens=1, temperature=0.0, timeout=timeout)

    @abstractmethod
    def close(self) -> None:
        """Give up the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _connect(self, request: Request, timeout_s: float | None) -> Call:
        """Send the request."""

    def _start(self, request: Request, timeout: float | None) -> Stream:
        policy = self._policy if timeout is None else dataclasses.replace(self._policy, timeout_s=timeout)
        return Stream(lambda remaining_s: self._connect(request, remaining_s), policy)
