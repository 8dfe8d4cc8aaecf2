"""Communication between the launchers of several nodes, through the store.

A launcher starts no rank again once a rank of any node has ended its training. A launcher that
holds the store, or a part of it, ends after the ranks of all nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import THREAD_PREFIX
from decent_optim_wrapper.launcher.output import say

PAUSE = 1.0
# Looks without a new beat after which a node has died, and seconds without a look after which the
# store has. Kubernetes needs some of them to start the pod of node 0 again.
_LOOKS, SILENT_SECONDS = 10, 30.0
_ENDED = "ended"


class Nodes:
    """Sends heartbeats for this node, and watches the other nodes, on its own thread.

    Args:
        connect: connects to the store; it may block.
        node: the number of this node.
        nnodes: number of nodes.
        holders: the nodes that hold the store.
    """

    def __init__(
        self, connect: Callable[[], Any], node: int, nnodes: int, holders: Collection[int]
    ) -> None:
        self._connect = connect
        self._node = node
        # Whether a rank of any node has ended without an error.
        self.finished = False
        self._tells = self._ended = False
        self._holds, self._alone = node in holders, len(holders) == 1
        # The other node with which the store would be lost.
        self._keeper = next(iter(holders)) if self._alone and not self._holds else None
        # Looks since the last new beat of each other node that has not ended.
        self._silent = {other: 0 for other in range(nnodes) if other != node}
        self._beats: dict[int, str] = {}
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
        if self._keeper is not None and time.monotonic() > self._deadline:
            return (
                f"the store of node {self._keeper} has not answered for "
                f"{SILENT_SECONDS:g} s: look at the launcher there"
            )
        return ""

    def leave(self, should_stop: Callable[[], bool]) -> None:
        """Tell the others that the ranks of this node have ended; wait for theirs as a holder.

        Args:
            should_stop: tells whether to wait no longer.
        """
        self._looked = time.monotonic()
        self._ended = True
        while self._holds and self._silent and self._thread.is_alive() and not should_stop():
            if time.monotonic() > self._looked + SILENT_SECONDS:
                break
            time.sleep(0.1)
        if self._holds and not self._alone:
            # The other holders look once more, and need most of the servers for that.
            time.sleep(2 * PAUSE)
        self._stop.set()
        self._thread.join(2 * PAUSE)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._beat(PrefixStore("decent_optim_wrapper/launcher", self._connect()))
            except RuntimeError:
                # The store is gone: the ranks say so themselves.
                if self._keeper is None or self._stop.is_set():
                    return
                say(
                    f"the store of node {self._keeper} does not answer: no rank is started again "
                    f"before it does"
                )
                self._deadline = min(self._deadline, time.monotonic() + SILENT_SECONDS)
                self._stop.wait(PAUSE)

    def _beat(self, store: Any) -> None:
        for number in count():
            store.set(_beat_key(self._node), _ENDED if self._ended else str(number))
            self._look(store)
            if self._stop.wait(PAUSE):
                store.set(_beat_key(self._node), _ENDED)
                return

    def _look(self, store: Any) -> None:
        if self._tells:
            store.set("finished", "1")
        self.finished = self.finished or store.check(["finished"])
        if self._ended:
            for other in list(self._silent):
                self._look_at(other, store)
        self._looked = time.monotonic()
        self._deadline = self._looked + SILENT_SECONDS

    def _look_at(self, other: int, store: Any) -> None:
        key = _beat_key(other)
        beat = store.get(key).decode() if store.check([key]) else ""
        self._silent[other] = self._silent[other] + 1 if beat == self._beats.get(other) else 0
        self._beats[other] = beat
        if self._silent[other] >= _LOOKS:
            # The other holders need not look as often before the servers go.
            beat = store.compare_set(key, beat, _ENDED).decode()
        if beat == _ENDED:
            del self._silent[other]


def _beat_key(node: int) -> str:
    return f"beat/{node}"
