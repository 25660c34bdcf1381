"""`p2p-engine top`: a proxy's instances, pairs and requests, live in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from http import HTTPStatus
from http.client import HTTPException
from itertools import islice
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2p_engine.cli.proxies import KnownProxy, find_first_proxies, words_of
from p2p_engine.errors import P2pError

_SILENT_SECONDS = 10.0  # the proxy says something every second
_MAX_LINE_BYTES = 16 << 20
_MAX_ROWS = 10  # of pairs, and of requests
_COLOURS = {"ready": "green", "not_ready": "red", "gone": "red"}
Picture = dict[str, Any]


class TopEnded(P2pError):
    """No proxy shows its state, or shows no more of it; each line of the message says why."""


def run_top(names: str, num_pictures: int, console: Console) -> int:
    """Show what the first of some proxies that answers says of itself, again every second, or so
    many times (0: without an end).

    In a terminal, each picture takes the place of the one before. Return 0. Blocks.

    Raises:
        ConfigError: a name is no address, or none means a proxy.
        TopEnded: no proxy is there and shows its state, or the one that did has ended.
    """
    failures: list[str] = []
    for proxy in find_first_proxies(names):
        try:
            _show(proxy, num_pictures, console, failures)
        except _NotShown as error:
            failures.append(str(error))
        else:
            return 0
    raise TopEnded("\n".join(failures))


class _NotShown(P2pError):
    """A proxy does not show its state."""


def _show(proxy: KnownProxy, num_pictures: int, console: Console, failures: list[str]) -> None:
    """Show one proxy, after what is to be said of those before it.

    Raises:
        _NotShown: it never showed anything.
        TopEnded: it shows no more.
    """
    before: Picture | None = None
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        for picture in islice(_pictures(proxy), num_pictures or None):
            try:
                shown = render(picture, before)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise _NotShown(f"proxy {proxy}: it is no proxy of this release") from error
            if before is None:
                for line in failures:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
            before = picture
            if live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def _pictures(proxy: KnownProxy) -> Iterator[Picture]:
    has_shown = False
    try:
        with proxy.open("/status/events", _SILENT_SECONDS) as answer:
            if answer.status != HTTPStatus.OK:
                raise _NotShown(f"proxy {proxy}: HTTP {answer.status} at /status/events")
            while line := answer.readline(_MAX_LINE_BYTES):
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
                    has_shown = True
    except (OSError, HTTPException, ValueError) as error:
        kind = TopEnded if has_shown else _NotShown
        raise kind(f"proxy {proxy}: {words_of(error)}") from error
    if not has_shown:
        raise _NotShown(f"proxy {proxy}: it shows nothing at /status/events")
    raise TopEnded(f"proxy {proxy} has ended")


def render(picture: Picture, before: Picture | None) -> Group:
    """Return a picture as tables; rates need the one before."""
    instances = sorted(picture["instances"], key=lambda item: (item["roles"], item["name"]))
    states = [item["state"] for item in instances]
    line = (
        f"{states.count('ready')} of {len(states)} instances ready, "
        f"{picture['requests_in_flight']} requests in flight, "
        f"{picture['requests_queued']} queued"
    )
    head = Text(line if not picture["warning"] else f"{line}\n{picture['warning']}")
    parts = [_instances(instances, _rates(picture, before)), _pairs(picture, before)]
    return Group(head, *(part for part in (*parts, _recent(picture)) if part.row_count))


def _instances(instances: list[Picture], rates: dict[str, float]) -> Table:
    table = _table("instance", "roles", "state", "P", "D", "tokens", "events/s", "breaker", "beat")
    for item in instances:
        flight, age = item["in_flight"], item["heartbeat_age_seconds"]
        shut = [role for role, state in item["breaker"].items() if state != "closed"]
        table.add_row(
            _safe(item["name"]),
            "+".join(item["roles"]),
            Text(item["state"], style=_COLOURS.get(item["state"], "yellow")),
            str(flight["prefill"]),
            str(flight["decode"]),
            str(item["tokens_in_flight"]),
            f"{rates.get(item['name'], 0.0):.0f}",
            Text("+".join(shut), style="red"),
            "" if age is None else f"{age:.1f} s",
        )
    return table


def _pairs(picture: Picture, before: Picture | None) -> Table:
    table = _table("prefill", "decode", "requests", "KV", "KV/s")
    past = {
        (pair["prefill"], pair["decode"]): pair["kv_bytes"]
        for pair in (before or {}).get("pairs", ())
    }
    seconds = _seconds(picture, before)
    for pair in picture["pairs"][:_MAX_ROWS]:
        moved = pair["kv_bytes"] - past.get((pair["prefill"], pair["decode"]), pair["kv_bytes"])
        rate = _size(max(moved, 0) / seconds) if seconds else ""
        names = _safe(pair["prefill"] or "none"), _safe(pair["decode"])
        table.add_row(*names, str(pair["requests"]), _size(pair["kv_bytes"]), rate)
    return table


def _recent(picture: Picture) -> Table:
    table = _table(
        "last requests", "status", "outcome", "queue ms", "prefill ms", "first ms", "all ms"
    )
    for item in picture["recent"][:_MAX_ROWS]:
        times = ("queue_ms", "prefill_ms", "first_byte_ms", "total_ms")
        shown = ["" if item[name] is None else f"{item[name]:.0f}" for name in times]
        pair = " > ".join(_safe(item[role] or "-").plain for role in ("prefill", "decode"))
        table.add_row(Text(pair), str(item["status"]), _safe(item["outcome"]), *shown)
    return table


def _rates(picture: Picture, before: Picture | None) -> dict[str, float]:
    """Return the stream events per second of each instance; its successor begins at 0 again."""
    past = {item["name"]: item["events_sent"] for item in (before or {}).get("instances", ())}
    seconds = _seconds(picture, before)
    return {
        item["name"]: max(item["events_sent"] - past.get(item["name"], 0), 0) / seconds
        for item in picture["instances"]
        if seconds
    }


def _seconds(picture: Picture, before: Picture | None) -> float:
    return float(picture["seconds"] - before["seconds"]) if before is not None else 0.0


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < 3 else "right", no_wrap=True)
    return table


def _safe(text: object) -> Text:
    """Return what an instance has said of itself, without marks or control characters."""
    return Text("".join(char if char.isprintable() else "?" for char in str(text)))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
