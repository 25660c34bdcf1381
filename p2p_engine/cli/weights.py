"""`p2p-engine weights`: one order for the weights of a fleet, and names for them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

import msgspec
from rich.console import Console

from p2p_engine.cli.proxies import KnownProxy, find_first_proxies, words_of
from p2p_engine.errors import ConfigError, P2pError

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
# A label is given within this: the proxy asks each instance twice, for 30 s at the most.
_LABEL_SECONDS = 90.0
_SILENCE_SECONDS = 30.0  # of a proxy to which an order was given
_REPEAT = "instances that vLLM has paused stay paused: repeat the order"


class _Order(msgspec.Struct):
    id: str
    label: str
    state: str
    steps: dict[str, str] = {}
    failed: dict[str, str] = {}


class _Weights(msgspec.Struct):
    order: _Order | None = None
    earlier: list[_Order] = []

    def find(self, order_id: str) -> _Order | None:
        orders = [self.order, *self.earlier] if self.order else []
        return next((order for order in orders if order.id == order_id), None)


class _WeightsStatus(msgspec.Struct):
    weights: _Weights


class _WeightsRefused(P2pError):
    """The order was not taken; the message says why."""


def run_update(names: str, key: str, order: Mapping[str, Any], console: Console) -> int:
    """Give an order to the first proxy that answers, and wait until it is over.

    Return 0 if all instances have the label; else 1, and each that has not is named. Blocks for as
    long as the order's own deadlines allow.

    Raises:
        ConfigError: a name is no address, or the names mean no proxy.
    """
    try:
        proxy, said = _give(names, key, "/weights/update", order, _ANSWER_SECONDS)
        ended = _wait(proxy, said.get("order", ""), console)
    except _WeightsRefused as error:
        _say(console, str(error))
        return 1
    for address, step in ended.steps.items():
        if address not in ended.failed:
            _say(console, f"{address}: {ended.label if step == 'done' else step}")
    # One without a step was gone before its turn came.
    failed = {
        address: f"paused: {why}" if address in ended.steps else why
        for address, why in ended.failed.items()
    }
    return _conclude(failed, console)


def run_label(names: str, key: str, label: str, model: str, console: Console) -> int:
    """Have a proxy give its instances of a model a label; return 0 if all have it. "" names the
    model of a proxy that has one.

    Raises:
        ConfigError: a name is no address, or the names mean no proxy.
    """
    try:
        asked = {"label": label, "model": model}
        _, said = _give(names, key, "/weights/label", asked, _LABEL_SECONDS)
    except _WeightsRefused as error:
        _say(console, str(error))
        return 1
    return _tell_labels(said.get("instances", {}), label, console)


def run_label_directly(instances: str, label: str, console: Console) -> int:
    """Give instances a label, given as HOST:PORT,...; return 0 if all have it. vLLM asks for no key
    there.

    Raises:
        ConfigError: a name is no address, or does not resolve.
    """
    outcomes = {str(found): _label_one(found, label) for found in find_first_proxies(instances)}
    return _tell_labels(outcomes, label, console)


def run_resume(names: str, key: str, instance: str, console: Console) -> int:
    """Have a proxy resume an instance, whatever label it has; return 0 if vLLM has resumed it.

    Raises:
        ConfigError: a name is no address, or the names mean no proxy.
    """
    try:
        _, said = _give(names, key, "/weights/resume", {"instance": instance}, _LABEL_SECONDS)
    except _WeightsRefused as error:
        _say(console, str(error))
        return 1
    _say(console, str(said.get("message", "")))
    return 0


def read_calls(calls: list[str]) -> list[dict[str, Any]]:
    """Return the calls of an order, each given as "PATH" or "PATH JSON".

    Raises:
        ConfigError: one is not of that form.
    """
    read = []
    for call in calls:
        path, _, text = call.strip().partition(" ")
        try:
            body = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError as error:
            raise ConfigError(f"call {call!r}: {error}") from error
        if not isinstance(body, dict):
            raise ConfigError(f"call {call!r}: its body is not a JSON object")
        read.append({"path": path, "body": body})
    return read


def _give(
    names: str, key: str, path: str, order: Mapping[str, Any], seconds: float
) -> tuple[KnownProxy, dict[str, Any]]:
    """Give an order to the first proxy that answers; return it, and what it says."""
    headers = {"X-Api-Key": key, "Content-Type": "application/json"}
    silent = []
    for proxy in find_first_proxies(names):
        try:
            proxy.ask("/health", _ANSWER_SECONDS)
        except (OSError, HTTPException) as error:
            silent.append(f"{proxy}: {words_of(error)}")
            continue
        try:
            status, said = proxy.ask(path, seconds, order, headers)
            if status != HTTPStatus.OK:
                raise _WeightsRefused(f"{proxy}: {_refusal_in(status, said)}")
            return proxy, msgspec.json.decode(said, type=dict[str, Any])
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            # It may have taken the order: no other gets it.
            raise _WeightsRefused(f"{proxy}: {words_of(error)}; see its /status") from error
    raise _WeightsRefused("; ".join(silent))


def _refusal_in(status: int, said: bytes) -> str:
    try:
        return str(msgspec.json.decode(said)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"HTTP {status}: {said[:200].decode(errors='replace')}"


def _wait(proxy: KnownProxy, order_id: str, console: Console) -> _Order:
    """Wait until an order is over; the proxy's own deadlines bound it."""
    heard_at, shown = time.monotonic(), ""
    while True:
        try:
            status, said = proxy.ask("/status", _ANSWER_SECONDS)
            if status != HTTPStatus.OK:
                raise OSError(None, f"HTTP {status} at /status")
            order = msgspec.json.decode(said, type=_WeightsStatus).weights.find(order_id)
            heard_at = time.monotonic()
            if order is None:
                raise _WeightsRefused(f"{proxy}: it has restarted; {_REPEAT}")
            if order.state == "done":
                return order
            if order.state != shown:
                shown = order.state
                _say(console, f"{proxy}: {shown}")
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            if time.monotonic() - heard_at > _SILENCE_SECONDS:
                raise _WeightsRefused(f"{proxy}: {words_of(error)}; {_REPEAT}") from error
        time.sleep(_POLL_SECONDS)


def _label_one(instance: KnownProxy, label: str) -> str:
    """Return why an instance does not have the label; "" if it has."""
    headers = {"Content-Type": "application/json"}
    try:
        order = {"new_version": label}
        status, _ = instance.ask("/update_weight_version", _ANSWER_SECONDS, order, headers)
        if status != HTTPStatus.OK:
            return f"HTTP {status} at /update_weight_version"
        status, said = instance.ask("/weight_info", _ANSWER_SECONDS, None, headers)
        if status != HTTPStatus.OK:
            return f"HTTP {status} at /weight_info"
        theirs = msgspec.json.decode(said, type=dict[str, Any]).get("weight_version")
    except (OSError, HTTPException, msgspec.MsgspecError) as error:
        return words_of(error)
    return "" if theirs == label else f"it has {theirs}, not {label}"


def _tell_labels(outcomes: Mapping[str, str], label: str, console: Console) -> int:
    failed = {address: why for address, why in outcomes.items() if why}
    for address in outcomes.keys() - failed.keys():
        _say(console, f"{address}: {label}")
    return _conclude(failed, console)


def _conclude(failed: Mapping[str, str], console: Console) -> int:
    for address, why in failed.items():
        _say(console, f"{address}: {why}")
    return int(bool(failed))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
