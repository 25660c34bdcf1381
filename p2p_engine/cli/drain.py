"""`p2p-engine drain`: takes an instance out at every proxy, and waits for its last request."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
from collections.abc import Sequence

from rich.console import Console

from p2p_engine.cli.members import fetch_text, post_json
from p2p_engine.errors import ConfigError
from p2p_engine.wire.addresses import join_address, split_address

_POLL_SECONDS = 0.5


def run_drain(
    proxies: Sequence[str], instance: str, key: str, timeout_seconds: float, console: Console
) -> int:
    """Drain an instance at all proxies; return 1 if one refuses, or if requests still run there
    after the timeout. A proxy that cannot be reached, or does not know the instance, sends nothing.
    """
    deadline = time.monotonic() + timeout_seconds
    outcomes = {proxy: _order(proxy, instance, key, timeout_seconds) for proxy in proxies}
    open_at = [proxy for proxy, refusal in outcomes.items() if not refusal]
    while open_at and time.monotonic() < deadline:
        open_at = [proxy for proxy in open_at if _is_in_use(proxy, instance)]
        if open_at:
            time.sleep(_POLL_SECONDS)
    outcomes |= dict.fromkeys(open_at, f"requests still run after {timeout_seconds:g} s")
    for proxy, problem in outcomes.items():
        console.print(f"{proxy}: {problem or 'drained'}", markup=False, highlight=False)
    return int(any(outcomes.values()))


def addresses_of(names: str) -> list[str]:
    """Return the address of each proxy behind some names, given as HOST:PORT,...; may block in the
    resolver.

    Raises:
        ConfigError: a name is not HOST:PORT, or does not resolve.
    """
    found: dict[str, None] = {}
    for name in names.split(","):
        try:
            host, port = split_address(name.strip())
            for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found[join_address(str(item[4][0]), port)] = None
        except (OSError, ValueError) as error:
            raise ConfigError(f"proxy is {name!r}: {error}") from error
    return list(found)


def _order(proxy: str, instance: str, key: str, timeout_seconds: float) -> str:
    """Order the drain; return why the proxy refuses, or ""."""
    body = {"instance": instance, "timeout_seconds": timeout_seconds}
    headers = {"X-Api-Key": key, "Content-Type": "application/json"}
    try:
        post_json(f"http://{proxy}/instances/remove", body, headers)
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else f"HTTP {error.code}: {error.read().decode()[:200]}"
    except (OSError, ValueError):
        return ""  # nobody is there
    return ""


def _is_in_use(proxy: str, instance: str) -> bool:
    text = fetch_text(f"http://{proxy}/status")
    known = json.loads(text)["instances"] if text is not None else []
    return any(item["http_address"] == instance and item["state"] != "drained" for item in known)
