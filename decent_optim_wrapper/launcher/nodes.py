"""Communication between the launchers of several nodes, through the store.

A launcher starts no rank again once a rank of any node has ended its training. The launcher that
holds the store ends after the ranks of all nodes.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import THREAD_PREFIX

PAUSE = 1.0
# Looks without a new beat after which a node has died, and seconds without a look after which the
# store has. Kubernetes needs some of them to start the pod of node 0 again.
_LOOKS, SILENT_SECONDS = 10, 30.0
_ENDED = "ended"
FINISHED = "others have ended without an error"


@dataclass(eq=False)
class Nodes:
    """Sends heartbeats for this node, and watches the other nodes, on its own thread.

    Args:
        connect: connects to the store; it may block.
        node: the number of this node.
        nnodes: number of nodes.
        keeper: the node that holds the store, and with which it is lost; None for a store that is
            there already, and may keep what an earlier run has written.
        say: prints a line.
    """

    connect: Callable[[], Any]
    node: int
    nnodes: int
    keeper: int | None
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        # Whether a rank of any node has ended without an error.
        self.finished = False
        self._tells = self._ended = False
        self._holds = self.keeper == self.node
        # The other node with which the store would be lost.
        self._keeper = None if self._holds else self.keeper
        # What stands for a finished rank of an earlier run; None before the first look.
        self._earlier: bytes | None = None if self.keeper is None else b""
        # The last beat of each other node that has not ended, and the looks since it was new.
        self._others = dict.fromkeys({*range(self.nnodes)} - {self.node}, (b"", 0))
        self._looked = time.monotonic()
        # By when the store must have answered again; it may still have to start.
        self._deadline = float("inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, daemon=True, name=f"{THREAD_PREFIX}launcher"
        )
        self._thread.start()

    def note_finished(self) -> None:
        """Tell the others that a rank of this node has ended without an error."""
        self.finished = self._tells = True

    def can_meet(self, died: float) -> bool:
        """Whether a rank that has died then would find the store if it were started now."""
        # A process that waits for a store that is lost does so for a minute, or more.
        return self._keeper is None or self._looked > died

    def why_no_restart(self) -> str:
        """Why no rank can be started again; empty if the store may answer."""
        if self.finished:
            return FINISHED
        if self._keeper is None or time.monotonic() < self._deadline:
            return ""
        return (
            f"the store of node {self._keeper} has not answered for {SILENT_SECONDS:g} s: look at "
            f"the launcher there"
        )

    def leave(self, should_stop: Callable[[], bool]) -> None:
        """Tell the others that the ranks of this node have ended.

        The node that holds the store waits for the others, until `should_stop` returns True.
        """
        self._looked = time.monotonic()
        self._ended = True
        while self._holds and self._others and self._thread.is_alive() and not should_stop():
            if time.monotonic() > self._looked + SILENT_SECONDS:
                break
            time.sleep(0.1)
        self._stop.set()
        self._thread.join(2 * PAUSE)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._beat(PrefixStore("decent_optim_wrapper/launcher", self.connect()))
            except RuntimeError:
                # The store is gone: the ranks say so themselves.
                if self._keeper is None or self._stop.is_set():
                    return
                self.say(
                    f"the store of node {self._keeper} does not answer: no rank is started again "
                    f"before it does"
                )
                self._deadline = min(self._deadline, time.monotonic() + SILENT_SECONDS)
                self._stop.wait(PAUSE)

    def _beat(self, store: Any) -> None:
        for number in count():
            is_last = self._stop.is_set()
            store.set(f"beat/{self.node}", _ENDED if self._ended else str(number))
            self._look(store)
            if is_last:
                return
            self._stop.wait(PAUSE)

    def _look(self, store: Any) -> None:
        told = _find(store, "finished")
        if self._earlier is None:
            self._earlier = told
        if self._tells:
            store.set("finished", uuid.uuid4().hex)
        self.finished = self.finished or told != self._earlier
        if self._ended and self._holds:
            for other, (before, looks) in list(self._others.items()):
                beat = _find(store, f"beat/{other}")
                looks = looks + 1 if beat == before else 0
                self._others[other] = (beat, looks)
                if beat == _ENDED.encode() or looks >= _LOOKS:
                    del self._others[other]
        self._looked = time.monotonic()
        self._deadline = self._looked + SILENT_SECONDS


def _find(store: Any, key: str) -> bytes:
    """The value of a key; empty if it has none."""
    return bytes(store.get(key)) if store.check([key]) else b""
