"""The page of the proxy is the code's: routes, settings, policies, errors, admin keys, metrics."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec
from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from proxy.app import Proxy, create_app
from proxy.config import ProxyConfig
from proxy.fleet.admin import _Addition, _Removal
from proxy.fleet.instances import Instance
from proxy.http.strict import CODE
from proxy.observe.request_log import RequestRecord
from proxy.routing.policies import POLICIES
from tests.support import CODES_OF_QUART

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "proxy.md").read_text()
ROLES = ["prefill", "decode"]
MAKERS = ("BodyRefused", "LegFailed", "ProxyError")
IN_CODES = {"role": ROLES, "role.label": ROLES, "kind": ["failed", "timeout"]}


def section(title: str) -> str:
    """The part of the page under a heading, without the parts below it of the same level."""
    level = re.search(rf"^(#+) {title}$", PAGE, re.MULTILINE)
    assert level is not None
    return re.split(rf"\n#{{1,{len(level[1])}}} ", PAGE[level.end() :])[0]


def first_cells(text: str) -> list[str]:
    """Every name in backticks in the first column of a section's tables."""
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_route_is_there() -> None:
    rules = create_app(ProxyConfig()).url_map.iter_rules()
    true = {
        f"{method} {rule.rule}"
        for rule in rules
        for method in {"GET", "POST"} & (rule.methods or set())
    }
    assert sorted(first_cells(section("Routes"))) == sorted(true)


def test_every_setting_is_there_with_its_default() -> None:
    told: dict[str, str] = {}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]*)\|", section("Settings"), re.MULTILINE)
    for names, defaults in rows:
        keys, values = re.findall(r"\w+", names), defaults.strip().replace("`", "").split(", ")
        told |= dict(zip(keys, values * len(keys) if len(values) == 1 else values, strict=True))
    assert set(told) == {field.name for field in fields(ProxyConfig)}
    for field in fields(ProxyConfig):
        default = getattr(ProxyConfig(), field.name)
        assert type(default)(told[field.name]) == default, field.name


def test_every_policy_is_there() -> None:
    assert first_cells(section("Policies")) == list(POLICIES)


def test_every_state_of_an_instance_is_there() -> None:
    text = section("How instances come and go").split("### ")[0]
    states = re.findall(r'"(\w+)"', inspect.getsource(Instance.state))
    assert sorted(first_cells(text)) == sorted(states)


def codes() -> Iterator[str]:
    """The code of every error that the proxy answers, spelt out for each role."""
    yield from (CODE, *CODES_OF_QUART)
    for path in (ROOT / "proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS:
                match node.args[1]:
                    case ast.Constant(value=str(code)):
                        yield code
                    case ast.JoinedStr(values=parts):
                        yield from map("".join, itertools.product(*map(_spelt_out, parts)))


def _spelt_out(part: ast.expr) -> list[str]:
    if isinstance(part, ast.FormattedValue):
        return IN_CODES[ast.unparse(part.value)]
    return [ast.literal_eval(part)]


def test_every_error_is_there() -> None:
    text = section("Errors")
    log_only = re.findall(r"`(\w+)`", text.split("In the log")[1])
    assert set(first_cells(text)) == set(codes()) - set(log_only)


def test_every_key_of_an_admin_request_is_there() -> None:
    rows = re.findall(
        r"^\| (both|add|remove) \| ([^|]+) \|", section("Add and remove instances"), re.M
    )
    told = {verb: set[str]() for verb in ("both", "add", "remove")}
    for verb, names in rows:
        told[verb] |= set(re.findall(r"`(\w+)`", names))
    for verb, kind in (("add", _Addition), ("remove", _Removal)):
        keys = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert told["both"] | told[verb] == keys


def test_the_line_of_the_log_is_a_real_one() -> None:
    shown = json.loads(section("The log").split("```")[1])
    record = RequestRecord("/v1/completions", "", lambda: 0.0, 0.0)
    assert list(shown) == ["time", *record.describe()]


def labels_of_metrics() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every metric and its labels."""
    registry = Proxy(ProxyConfig(), time.monotonic, random.Random())._metrics._registry
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            name = collector._name + ("_total" if isinstance(collector, Counter) else "")
            yield name, tuple(collector._labelnames)
        else:
            for family in collector.collect():
                assert isinstance(family, GaugeMetricFamily)
                yield family.name, tuple(family._labelnames)


def test_every_metric_is_there_with_its_labels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", section("Metrics"), re.MULTILINE)
    told = {name: tuple(re.findall(r"\w+", labels)) for name, labels in rows}
    assert told == dict(labels_of_metrics())
