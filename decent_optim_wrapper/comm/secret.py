"""A secret that the processes of a run share hides what they write to a store from all others.

Their keys begin with an HMAC over a nonce of the run. So strangers, runs with another secret and
processes of an earlier run write other keys, which nobody reads.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.store import cloned, note_stranger

# The environment variable with the secret, which is kept nowhere else.
_VARIABLE = b"DECENT_SECRET"


def private(store: Any) -> Any:
    """The part of a store that only this run finds; without a secret, the whole store.

    The first process of the run writes a nonce, with an HMAC that shows that it has the secret.

    Args:
        store: the store of a run.

    Raises:
        DistError: the store is gone.
        ValueError: the secret is empty.
    """
    if (secret := os.environb.get(_VARIABLE)) is None:
        return store
    if not secret:
        raise ValueError("expected a secret in DECENT_SECRET, got an empty one; unset it for none")

    def mac(what: str, text: str = "") -> str:
        return hmac.new(secret, f"{what} {text}".encode(), "sha256").hexdigest()

    # The caller may give up while a call hangs, which must not block the store for others.
    asked = cloned(store)
    # Of this secret: processes with another one would replace each other's nonces for ever.
    key = f"decent_optim_wrapper/nonce {mac('key')}"
    while True:
        found = asked.get(key) if asked.check([key]) else b""
        nonce, _, shown = found.decode(errors="replace").partition(" ")
        if hmac.compare_digest(shown.encode(), mac("nonce", nonce).encode()):
            return PrefixStore(mac("run", nonce), store)
        if found:
            note_stranger(key)
        nonce = secrets.token_hex(16)
        asked.compare_set(key, found, f"{nonce} {mac('nonce', nonce)}")
