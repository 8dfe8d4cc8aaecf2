"""The URL of a store, which a launcher passes to its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import parse_qsl

from decent_optim_wrapper.comm.etcd_store import EtcdStore, read_endpoint

__all__ = ["EXAMPLE", "STORE_VARIABLE", "StoreUrl", "read_endpoint"]

# The environment variable that holds it.
STORE_VARIABLE = "DECENT_STORE"
EXAMPLE = "etcd://host1:2379,host2:2379,host3:2379/my-run"
_OPTIONS = {"user", "password", "ca_cert", "client_cert", "client_key"}


class StoreUrl(NamedTuple):
    """Where a store is, such as ``etcd://host1:2379,host2:2379,host3:2379/my-run?ca_cert=ca.pem``.

    Args:
        text: the URL.
        endpoints: host and port of each server, separated by commas.
        prefix: of all keys.
        options: further arguments of `EtcdStore`, by name.
    """

    text: str
    endpoints: str
    prefix: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Read a URL.

        Raises:
            ValueError: it is malformed. Of what may be a password, the text quotes nothing.
        """
        scheme, _, place = text.partition("://")
        place, _, query = place.partition("?")
        endpoints, _, prefix = place.partition("/")
        if scheme != "etcd" or not prefix:
            what = "without a prefix" if scheme == "etcd" else "of another kind"
            raise ValueError(f"expected a store as {EXAMPLE!r}, got one {what}")
        for each in endpoints.split(","):
            read_endpoint(each)
        options = dict(parse_qsl(query, keep_blank_values=True))
        if ";" in text or not options.keys() <= _OPTIONS:
            raise ValueError(
                f"expected options of the store etcd://{endpoints} as in ?ca_cert=ca.pem&user=me, "
                f"of {', '.join(sorted(_OPTIONS))}, got others; write & and ; in a value as %26 "
                f"and %3B"
            )
        return cls(text=text, endpoints=endpoints, prefix=prefix, options=options)

    def open(self, timeout: timedelta) -> EtcdStore:
        """The store.

        Args:
            timeout: bound of each of its calls.

        Raises:
            ModuleNotFoundError: the extra is not installed.
            ValueError: one of a pair of options is missing.
        """
        return EtcdStore(self.endpoints, self.prefix, timeout, **self.options)
