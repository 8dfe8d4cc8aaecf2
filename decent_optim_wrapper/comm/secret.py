"""A secret that the processes of a run share keeps all others out of its store and its groups.

What the processes write to a store has keys that begin with an HMAC over a nonce of the run. So
strangers, runs with another secret and processes of an earlier run write other keys, which nobody
reads. Whoever lists the keys can write there, too, but does not become a member of a group: its
members show each other that they have the secret.
"""

from __future__ import annotations

import hmac
import os
import secrets
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.store import as_text, cloned

# The place of a peer in a group, and the tag that selects a connection to it.
Link = tuple[int, int]
# The environment variable with the secret, which is kept nowhere else.
_VARIABLE = b"DECENT_SECRET"


def private(store: Any) -> Any:
    """The part of a store that only this run finds; without a secret, the whole store.

    The first process of the run writes a nonce.

    Args:
        store: the store of a run.

    Raises:
        DistError: the store is gone.
        ValueError: the secret is empty.
    """
    if _VARIABLE not in os.environb:
        return store
    # Of this secret: another run with another secret has a nonce of its own. The caller may give up
    # while a call hangs, which must not block the store for others.
    key = f"decent_optim_wrapper/nonce {_mac('key')}"
    nonce = cloned(store).compare_set(key, "", secrets.token_hex(16))
    return named(store, f"run {as_text(nonce)}")


def named(store: Any, name: str) -> Any:
    """A part of a store, if there is one, that has another name for each secret; without one, all.

    Raises:
        ValueError: the secret is empty.
    """
    return store if None in (store, os.environb.get(_VARIABLE)) else PrefixStore(_mac(name), store)


def prove(group: Any, timeout: timedelta) -> None:
    """Let the members of a gloo group show each other that they have the secret; collective.

    Each pair does so over each of its connections. Both ends add to the challenge, so no answer of
    another connection fits. Members without a secret take part with an empty one. Only a tunnel
    protects against somebody who passes the messages on.

    Args:
        group: the group.
        timeout: bound of each wait.

    Raises:
        RuntimeError: a member is missing, or has another secret.
        ValueError: the secret is empty, and there are other members.
    """
    own, nonce = group.rank(), secrets.token_hex(32)
    peers = [peer for peer in range(group.size()) if peer != own]
    links = [(peer, tag) for peer in peers for tag in range(len(group.options._devices))]
    found = _exchange(group, dict.fromkeys(links, nonce), timeout)
    shown = {(p, tag): _mac(f"{own} {p} {tag} {nonce} {found[p, tag]}") for p, tag in links}
    for (peer, tag), answer in _exchange(group, shown, timeout).items():
        expected = _mac(f"{peer} {own} {tag} {found[peer, tag]} {nonce}")
        if not hmac.compare_digest(answer.encode(), expected.encode()):
            raise RuntimeError(f"member {peer} has another DECENT_SECRET, or has none")


def _exchange(group: Any, texts: dict[Link, str], timeout: timedelta) -> dict[Link, str]:
    """Send texts of one length over connections, and receive as many."""
    sent = {k: torch.frombuffer(bytearray(v, "ascii"), dtype=torch.uint8) for k, v in texts.items()}
    found = {link: torch.empty_like(message) for link, message in sent.items()}
    works = [group.recv([message], *link) for link, message in found.items()]
    works += [group.send([message], *link) for link, message in sent.items()]
    for work in works:
        work.wait(timeout)
    return {link: as_text(bytes(message.tolist())) for link, message in found.items()}


def _mac(text: str) -> str:
    secret = os.environb.get(_VARIABLE)
    if secret == b"":
        raise ValueError("expected a secret in DECENT_SECRET, got an empty one; unset it for none")
    return hmac.new(secret or b"", text.encode(), "sha256").hexdigest()
