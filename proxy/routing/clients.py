"""ClientKeys: who may ask, by a file of keys, and how much each may ask for."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_engine.errors import ConfigError
from proxy.errors import ProxyError
from proxy.fleet.key_files import read_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.http.asgi import Ends

MIN_KEY_CHARS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]+")
_LIMIT = re.compile(r"(in_flight|per_minute)=([1-9][0-9]{0,8})")


@dataclass(eq=False)
class KnownClient:
    """One line of the file, and what its client has in progress. Limits of 0 are none."""

    name: str
    in_flight: int = 0
    per_minute: int = 0
    num_running: int = 0
    # The requests of late; `per_minute` of them are forgotten in a minute.
    num_recent: float = 0.0
    seen: float = field(default=0.0, repr=False)

    def begin(self, now: float, ends: Ends) -> None:
        """Count a request until its end.

        Raises:
            ProxyError: 429, the client is at a limit.
        """
        if self.in_flight and self.num_running >= self.in_flight:
            message = f"client {self.name} has {self.num_running} requests in progress"
            raise ProxyError(429, "client_limit", f"{message}, and may have no more")
        passed, self.seen = now - self.seen, now
        self.num_recent = max(0.0, self.num_recent - passed * self.per_minute / 60)
        if self.per_minute and self.num_recent > self.per_minute - 1:
            message = f"client {self.name} may send {self.per_minute} requests in a minute"
            wait = (self.num_recent - self.per_minute + 1) * 60 / self.per_minute
            raise ProxyError(429, "client_limit", message, retry_after=wait)
        self.num_recent += 1
        self.num_running += 1
        ends.callback(self._end)

    def _end(self) -> None:
        self.num_running -= 1


class ClientKeys:
    """All clients of the key file. Without a file anybody may ask, and nobody has a name."""

    def __init__(self, path: str, instance_key: str, clock: Callable[[], float]) -> None:
        """Read the file. `instance_key` is what instances get instead of a client's key, if it is
        not empty.

        Raises:
            ConfigError: it cannot be used; the message names the line.
        """
        self._path = path
        self._clock = clock
        self._instance_key = instance_key
        # By the hash of the key: a look-up tells nothing of how much of a key was right.
        self._by_hash = _read(path) if path else {}

    def passed_on(self, authorization: str) -> str:
        """Return the header `Authorization` for instances: a client's key of this proxy stays."""
        if self._instance_key:
            return f"Bearer {self._instance_key}"
        return "" if self._path else authorization

    def reload(self) -> None:
        """Read the file again. Who is still in it keeps what is counted.

        Raises:
            ConfigError: it cannot be used; the old one stays.
        """
        if not self._path:
            return
        known = {client.name: client for client in self._by_hash.values()}
        found = _read(self._path)
        for client in found.values():
            if (old := known.get(client.name)) is not None:
                old.in_flight, old.per_minute = client.in_flight, client.per_minute
        self._by_hash = {key: known.get(client.name, client) for key, client in found.items()}

    def find(self, authorization: str) -> KnownClient | None:
        """Return who asks; None if no key is needed.

        Raises:
            ProxyError: 401, the key is missing or wrong.
        """
        if not self._path:
            return None
        scheme, _, key = authorization.partition(" ")
        client = self._by_hash.get(_hash(key.strip()))
        if client is None or scheme.lower() != "bearer":
            said = "is wrong" if key.strip() else "is missing: Authorization: Bearer KEY"
            raise ProxyError(401, "invalid_api_key", f"the API key {said}")
        return client

    def admit(self, client: KnownClient, ends: Ends) -> None:
        """Count a request of a client until its end.

        Raises:
            ProxyError: 429, the client is at a limit.
        """
        client.begin(self._clock(), ends)


def _read(path: str) -> dict[bytes, KnownClient]:
    found: dict[bytes, KnownClient] = {}
    names = set[str]()
    for number, line in enumerate(read_lines("client_keys_file", path), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, client = _parse(f"client_keys_file {path!r} line {number}", words)
        if _hash(key) in found or client.name in names:
            raise ConfigError(
                f"client_keys_file {path!r} line {number}: the name or the key was there before"
            )
        found[_hash(key)] = client
        names.add(client.name)
    if not found:
        raise ConfigError(f"client_keys_file {path!r} has no client")
    return found


def _parse(where: str, words: list[str]) -> tuple[str, KnownClient]:
    """Return the key and the client of a line; no message has a key."""
    if len(words) < 2 or not _NAME.fullmatch(words[0]):
        raise ConfigError(f"{where}: allowed: NAME KEY [in_flight=N] [per_minute=N]")
    name, key, *limits = words
    if len(key) < MIN_KEY_CHARS or not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key has at least {MIN_KEY_CHARS} printable ASCII characters")
    parsed = [_LIMIT.fullmatch(limit) for limit in limits]
    if None in parsed:
        raise ConfigError(f"{where}: allowed behind the key: in_flight=N, per_minute=N")
    return key, KnownClient(
        name, **{match[1]: int(match[2]) for match in parsed if match is not None}
    )


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
