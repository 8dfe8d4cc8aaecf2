"""A secret that the processes of a run share keeps all others out of its store and its groups.

What the processes write to a store has keys with an HMAC over a nonce of the run. So strangers,
runs with another secret and processes of an earlier run write other keys, which nobody reads.
Whoever lists the keys can write there, too, but no value that counts: each has an HMAC over its key
and itself. And the members of a group show each other that they have the secret.
"""

from __future__ import annotations

import hmac
import os
import secrets
from datetime import timedelta
from typing import Any

import torch

# The place of a peer in a group, and the tag that selects a connection to it.
Link = tuple[int, int]
# The environment variable with the secret, which is kept nowhere else.
_VARIABLE = b"DECENT_SECRET"


def is_set() -> bool:
    """Return whether the processes share a secret."""
    return _VARIABLE in os.environb


def named(name: str, nonce: str = "") -> str:
    """A name with an HMAC over it and a nonce; without a secret, the name alone.

    Raises:
        ValueError: the secret is empty.
    """
    return f"{name} {_mac(f'name {name} {nonce}')}" if is_set() else name


def signed(place: str, key: str, value: str) -> str:
    """A value behind an HMAC over the part of the store, the key and the value.

    Without a secret anybody can make one.
    """
    return f"{_mac(str([place, key, value]))} {value}"


def verified(place: str, key: str, text: str) -> str | None:
    """The value of a text that `signed` has returned for this key; None for another text."""
    value = text.partition(" ")[2]
    expected = signed(place, key, value)
    return value if hmac.compare_digest(expected.encode(), text.encode()) else None


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
    return {k: bytes(message.tolist()).decode(errors="replace") for k, message in found.items()}


def _mac(text: str) -> str:
    secret = os.environb.get(_VARIABLE)
    if secret == b"":
        raise ValueError("expected a secret in DECENT_SECRET, got an empty one; unset it for none")
    return hmac.new(secret or b"", text.encode(), "sha256").hexdigest()
