"""The signals that the launcher receives, noted for its loop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

# The signals that end the launch, and as what they count: ranks would dump their cores on SIGQUIT.
_ENDING = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGQUIT: signal.SIGTERM,
}
# Their meaning is up to the script: Slurm sends one when the time of a job is nearly up.
_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)


class ReceivedSignals:
    """Notes signals while it is entered: those that end the launch, and those of the script."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.requests: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._note) for number in (*_ENDING, *_REQUESTS)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received in _ENDING:
            self.received.append(_ENDING[received])
        else:
            self.requests.append(received)
