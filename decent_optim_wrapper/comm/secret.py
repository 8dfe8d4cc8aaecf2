"""A secret that the processes of a run share keeps all others out of its store and its groups.

What the processes write to a store has keys that begin with an HMAC over a nonce of the run. So
strangers, runs with another secret and processes of an earlier run write other keys, which nobody
reads. Whoever lists the keys can write there, too, but cannot enter a group: its members show each
other that they have the secret.
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
    return PrefixStore(_mac(f"run {as_text(nonce)}"), store)


def prove(group: Any, timeout: timedelta) -> None:
    """Let the members of a gloo group show each other that they have the secret; collective.

    All of them add to the challenge, so no answer of another group fits. Without a secret, they
    show that.

    Args:
        group: the group.
        timeout: bound of each of the two exchanges.

    Raises:
        RuntimeError: a member is missing, or has another secret.
        ValueError: the secret is empty.
    """
    challenge = "".join(_gathered(secrets.token_hex(32), group, timeout))
    expected = [_mac(f"member {place} {challenge}") for place in range(group.size())]
    answers = _gathered(expected[group.rank()], group, timeout)
    for place, answer in enumerate(answers):
        if not hmac.compare_digest(answer.encode(), expected[place].encode()):
            raise RuntimeError(f"member {place} has another DECENT_SECRET, or has none")


def _gathered(text: str, group: Any, timeout: timedelta) -> list[str]:
    """The texts of all members, which are of the same length."""
    own = torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")
    found = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([found], [own]).wait(timeout)
    return [as_text(bytes(each.tolist())) for each in found]


def _mac(text: str) -> str:
    secret = os.environb.get(_VARIABLE)
    if secret == b"":
        raise ValueError("expected a secret in DECENT_SECRET, got an empty one; unset it for none")
    return hmac.new(secret or b"", text.encode(), "sha256").hexdigest()
