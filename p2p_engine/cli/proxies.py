"""The proxies of a fleet, as a command asks them."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from p2p_engine.errors import ConfigError
from p2p_engine.wire.addresses import join_address, split_address

_HTTPS = "https://"


@dataclass(frozen=True)
class KnownProxy:
    """One address behind the name of one or several proxies."""

    host: str
    address: str
    port: int
    has_tls: bool = False

    def __str__(self) -> str:
        """Return its address."""
        return join_address(self.address, self.port)

    def ask(
        self,
        path: str,
        timeout: float,
        order: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Get a path, or post an order to it; return the status and the body.

        A certificate must be valid for the name. Trusted are the authorities of the machine, or
        those in `SSL_CERT_FILE`.

        Raises:
            OSError: refused, no trusted certificate, or no progress within `timeout` seconds.
            HTTPException: the answer is not HTTP.
        """
        with self.open(path, timeout, order, headers) as answer:
            return answer.status, answer.read()

    @contextmanager
    def open(
        self,
        path: str,
        timeout: float,
        order: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask as `ask` does, and yield an answer that is still to be read."""
        link = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            link.sock = socket.create_connection((self.address, self.port), timeout)
            if self.has_tls:
                trusted = ssl.create_default_context()
                link.sock = trusted.wrap_socket(link.sock, server_hostname=self.host)
            body = None if order is None else json.dumps(order)
            link.request("GET" if order is None else "POST", path, body, dict(headers or {}))
            with link.getresponse() as answer:
                yield answer
        finally:
            link.close()


def find_proxies(names: str) -> list[KnownProxy]:
    """Return each proxy behind some names, given as HOST:PORT,... or https://HOST:PORT,...; none
    for a name that does not exist. May block in the resolver.

    Raises:
        ConfigError: a name is not of that form.
        OSError: the resolver fails.
    """
    found: dict[tuple[str, int], KnownProxy] = {}
    for name in (item.strip() for item in names.split(",")):
        try:
            host, port = split_address(name.removeprefix("http://").removeprefix(_HTTPS))
        except ValueError as error:
            raise ConfigError(f"proxy is {name!r}: {error}") from error
        for address in _resolve(host, port):
            proxy = KnownProxy(host, address, port, name.startswith(_HTTPS))
            found.setdefault((address, port), proxy)
    return list(found.values())


def find_first_proxies(names: str) -> list[KnownProxy]:
    """Return the proxies that a command begins with, at least one; see `find_proxies`.

    Raises:
        ConfigError: a name is no address, cannot be looked up now, or none means a proxy.
    """
    try:
        proxies = find_proxies(names)
    except OSError as error:
        raise ConfigError(f"proxy is {names!r}: {error}") from error
    if not proxies:
        raise ConfigError(f"proxy is {names!r}: no address")
    return proxies


def words_of(error: Exception) -> str:
    """Say in words why a proxy did not answer as one; `error` is what `KnownProxy.ask` raises, or
    what reading its answer does."""
    match error:
        case ssl.SSLError():
            return f"no TLS with it: {error.reason or error}"
        case TimeoutError():
            return "no answer in time"
        case http.client.RemoteDisconnected() | http.client.IncompleteRead():
            return "it broke the connection"
        case http.client.HTTPException():
            return "its answer is not HTTP"
        case OSError():
            return error.strerror or str(error)
        case _:
            return "its answer is not what a proxy says"


def _resolve(host: str, port: int) -> list[str]:
    try:
        items = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    return [str(item[4][0]) for item in items]
