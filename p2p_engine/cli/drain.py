"""`p2p-engine drain`: takes an instance out at every proxy, and waits for its last request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPException

import msgspec
from rich.console import Console

from p2p_engine.cli.proxies import KnownProxy, find_first_proxies, find_proxies, words_of
from p2p_engine.errors import ConfigError, P2pError
from p2p_engine.wire.addresses import join_address, split_address

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_DRAINED = "drained"
_UNKNOWN = "does not know it"
# An admin's mistake; asking again changes nothing.
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS)


class _Shown(msgspec.Struct):
    """What `/status` says of an instance."""

    name: str
    http_address: str
    state: str
    in_flight: dict[str, int]


class _Status(msgspec.Struct):
    instances: list[_Shown]


class _OrderRefused(P2pError):
    """A proxy refuses an order."""


def run_drain(names: str, instance: str, key: str, timeout_seconds: float, console: Console) -> int:
    """Drain an instance, with all ranks at its address, at all proxies behind some names.

    Return 0 when each proxy has said that nothing runs there any more; 1 if one refuses, if one has
    not said so within the time, or if none knows the instance. The names are looked up again until
    then: a proxy that has left them no longer counts. Blocks.

    Raises:
        ConfigError: a name or the instance is no address, or the names mean no proxy.
    """
    drain = _Drain(_full_name(instance), key)
    deadline = time.monotonic() + timeout_seconds
    proxies = find_first_proxies(names)
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        outcomes = drain.ask_all(proxies, left)
        if left == 0.0 or not drain.may_change(outcomes):
            break
        time.sleep(min(_POLL_SECONDS, left))
        proxies = _find_again(names, proxies)
    for proxy, outcome in outcomes.items():
        console.print(f"{proxy}: {outcome}", markup=False, highlight=False, soft_wrap=True)
    return int(not drain.is_over(outcomes))


class _Drain:
    """The drain of an instance, and what became of it so far."""

    def __init__(self, instance: str, key: str) -> None:
        self._instance = instance
        self._headers = {"X-Api-Key": key, "Content-Type": "application/json"}
        self._is_known = False
        self._refused: dict[KnownProxy, str] = {}

    def ask_all(self, proxies: list[KnownProxy], left: float) -> dict[KnownProxy, str]:
        """Ask all proxies at the same time; return what each says."""
        if not proxies:
            return {}
        with ThreadPoolExecutor(len(proxies)) as threads:
            said = threads.map(lambda proxy: self._ask(proxy, left), proxies)
            return dict(zip(proxies, said, strict=True))

    def is_over(self, outcomes: Mapping[KnownProxy, str]) -> bool:
        """Tell whether no proxy is left that may send there. One must have known the instance."""
        return not outcomes or (self._is_known and set(outcomes.values()) <= {_DRAINED, _UNKNOWN})

    def may_change(self, outcomes: Mapping[KnownProxy, str]) -> bool:
        """Tell whether asking again may give another outcome."""
        final = {_DRAINED, _UNKNOWN, *self._refused.values()}
        return not set(outcomes.values()) <= final

    def _ask(self, proxy: KnownProxy, left: float) -> str:
        """Order the drain where it is not in progress; return what became of it."""
        if proxy in self._refused:
            return self._refused[proxy]
        try:
            for shown in self._shown_by(proxy):
                self._is_known = True
                if shown.state not in ("draining", _DRAINED):
                    self._order(proxy, shown.name, left)
            return _outcome_of(self._shown_by(proxy))
        except _OrderRefused as error:
            self._refused[proxy] = str(error)
            return str(error)
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            return words_of(error)

    def _shown_by(self, proxy: KnownProxy) -> list[_Shown]:
        status, body = proxy.ask("/status", _ANSWER_SECONDS)
        if status != HTTPStatus.OK:
            raise OSError(None, f"HTTP {status} at /status")
        known = msgspec.json.decode(body, type=_Status).instances
        return [item for item in known if self._instance in (item.name, item.http_address)]

    def _order(self, proxy: KnownProxy, name: str, left: float) -> None:
        # The proxy forgets an instance without heartbeats when its own time is over: after ours.
        seconds = left + 2 * _ANSWER_SECONDS
        order = {"instance": name, "timeout_seconds": seconds}
        status, body = proxy.ask("/instances/remove", _ANSWER_SECONDS, order, self._headers)
        said = f"HTTP {status}: {body[:200].decode(errors='replace')}"
        if status in _REFUSALS:
            raise _OrderRefused(said)
        if status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            raise OSError(None, said)


def _outcome_of(ranks: list[_Shown]) -> str:
    if not ranks:
        return _UNKNOWN
    in_flight = sum(sum(item.in_flight.values()) for item in ranks)
    if in_flight:
        return f"{in_flight} requests still run there"
    return _DRAINED if all(item.state == _DRAINED for item in ranks) else "not drained yet"


def _full_name(instance: str) -> str:
    """Put brackets around an IPv6 host that has none, as registered names have."""
    address, mark, rank = instance.partition("#")
    try:
        return join_address(*split_address(address)) + mark + rank
    except ValueError as error:
        raise ConfigError(f"instance is {instance!r}: {error}") from error


def _find_again(names: str, proxies: list[KnownProxy]) -> list[KnownProxy]:
    try:
        return find_proxies(names)
    except OSError:
        return proxies
