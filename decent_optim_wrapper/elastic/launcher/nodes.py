"""Communication between the launchers of several nodes, through the store.

A launcher starts no rank again once a rank of any node has ended its training. The launcher that
serves the store ends after the ranks of all nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.store import BoundedStore, part_of_run
from decent_optim_wrapper.errors import text_of

PAUSE = 1.0
# Looks without a new beat after which a node counts as dead, and seconds without an answer after
# which the store counts as lost. Kubernetes needs some of them to start the pod of node 0 again.
_LOOKS, SILENT_SECONDS = 10, 30.0
# How long a launcher waits at its end for a store that does not answer.
_CLOSE_SECONDS = 2.0


@dataclass(eq=False)
class Nodes:
    """Sends heartbeats for this node, and watches the other nodes, on its own thread.

    Args:
        connect: connects to the store; it may block.
        node: the number of this node.
        nnodes: number of nodes.
        keeper: the node that serves the store, and with which it is lost; None for a store that is
            there already.
        say: prints a line of the launcher.
    """

    connect: Callable[[], Any]
    node: int
    nnodes: int
    keeper: int | None
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        # Whether a rank of any node has ended without an error.
        self.finished = False
        self._ended = False
        # The other node with which the store would be lost.
        self._keeper = None if self.keeper == self.node else self.keeper
        # The last beat of each node, and the looks since it was new.
        self._beats = [("", 0)] * self.nnodes
        # The last look; before the first one, the store may still have to start.
        self._looked = float("inf")
        self._stop = threading.Event()
        self._talking = in_background(self._talk)

    def note_finished(self) -> None:
        """Notify the other nodes that a rank of this one has ended without an error."""
        self.finished = True

    def can_meet(self, died: float) -> bool:
        """Return whether a rank that died then would find the store if it were started now."""
        # A process that waits for a store that is lost does so for a minute, or more.
        return self._keeper is None or self._looked > died

    def why_no_restart(self) -> str:
        """Return why no rank can be started again; empty if the store may answer."""
        if self.finished:
            return "others have ended without an error"
        if self._keeper is None or not self._is_silent():
            return ""
        silent = f"the store of node {self._keeper} has not answered for {SILENT_SECONDS:g} s"
        return f"{silent}: look at the launcher there"

    def close(self, should_stop: Callable[[], bool]) -> None:
        """Notify the other nodes that the ranks of this one have ended.

        The node that serves the store waits for the others, until `should_stop` returns True.
        """
        self._ended = True
        while self._waits_for_others() and not should_stop():
            time.sleep(0.1)
        self._stop.set()
        wait([self._talking], _CLOSE_SECONDS)

    def _waits_for_others(self) -> bool:
        others = (each for node, each in enumerate(self._beats) if node != self.node)
        go_on = any(looks < _LOOKS and beat != "ended" for beat, looks in others)
        return go_on and self.keeper == self.node and not self._is_silent()

    def _is_silent(self) -> bool:
        return time.monotonic() > self._looked + SILENT_SECONDS

    def _talk(self) -> None:
        said = 0.0
        while not self._stop.is_set():
            try:
                store, name = self.connect(), "decent_optim_wrapper/launcher"
                self._beat(part_of_run(store, name, timedelta(seconds=SILENT_SECONDS), ours=True))
            except RuntimeError as error:
                # It should have started by now, even if it has never answered.
                self._looked = min(self._looked, time.monotonic())
                if self._is_silent() and said != self._looked:
                    said = self._looked
                    self.say(
                        f"the store has not answered for {SILENT_SECONDS:g} s: {text_of(error)}"
                    )
                self._stop.wait(PAUSE)

    def _beat(self, store: BoundedStore) -> None:
        keys = [*(f"node/{node}" for node in range(self.nnodes)), "finished"]
        for key in keys:
            # A store waits for a missing key.
            store.compare_set(key, "", "no")
        is_last = False
        while not is_last:
            is_last = self._stop.is_set()
            *beats, finished = store.look(keys)
            self._beats = [
                (new, looks + 1 if new == old else 0)
                for new, (old, looks) in zip(beats, self._beats, strict=True)
            ]
            self.finished = self.finished or finished == "yes"
            if self.finished:
                store.set("finished", "yes")
            # No two beats are the same.
            store.set(keys[self.node], "ended" if self._ended else str(time.time()))
            self._looked = time.monotonic()
            self._stop.wait(PAUSE)
