"""The signals that the launcher receives, noted for its loop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

_NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ReceivedSignals:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _NOTED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
