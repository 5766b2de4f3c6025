"""Hidden states that a sequence's drafter has not been fed yet."""

from __future__ import annotations

from collections import deque

from angelspec_backend.core.hidden_states import States


class HiddenQueue:
    """Rows of bytes, one per position, in order; they arrive in runs and leave in other runs."""

    def __init__(self) -> None:
        self._runs: deque[States] = deque()  # each [num_tokens, bytes_per_token]
        self._len = 0

    def __len__(self) -> int:
        """Positions that wait."""
        return self._len

    def append(self, states: States) -> None:
        """Add the states of the next positions, [num_tokens, bytes_per_token]; they are not copied."""
        if len(states):
            self._runs.append(states)
            self._len += len(states)

    def first(self, count: int) -> list[States]:
        """The states of the first ``count`` positions, as flat runs of bytes."""
        runs: list[States] = []
        for run in self._runs:
            if count <= 0:
                break
            runs.append(run[:count].reshape(-1))
            count -= len(run)
        return runs

    def drop(self, count: int) -> None:
        """Remove the first ``count`` positions.

        Raises:
            IndexError: fewer wait.
        """
        self._len -= count
        while count > 0:
            run = self._runs.popleft()
            if len(run) > count:
                self._runs.appendleft(run[count:])
            count -= len(run)

    def clear(self) -> None:
        """Remove everything."""
        self._runs.clear()
        self._len = 0
