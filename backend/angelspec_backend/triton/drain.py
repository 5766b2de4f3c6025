"""The order to finish: a file that whoever stops the server creates before it stops it.

It has to come first, since Triton refuses all calls between models once it has been told to exit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

RUN_DIR_ENV = "ANGELSPEC_RUN_DIR"
"""Names the folder of this run of the server; without it there is no draining."""

DRAIN_FILE = "drain"


class Drain:
    """Whether the server drains, and whether the running streams have had their time."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds running streams get."""
        folder = os.environ.get(RUN_DIR_ENV)
        self._file = Path(folder) / DRAIN_FILE if folder else None
        self._timeout = timeout
        self._since: float | None = None  # when the file was first seen

    @property
    def active(self) -> bool:
        """Whether new requests are to be refused."""
        return self._file is not None and self._file.exists()

    def overdue(self) -> bool:
        """Whether what still runs is to be ended; to be asked regularly."""
        if not self.active:
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since >= self._timeout
