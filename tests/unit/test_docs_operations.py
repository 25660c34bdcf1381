"""docs/troubleshooting.md, operations.md and models.md: each error, metric, statistic and kind of
cache has its place there, and they quote only what the code says."""

from __future__ import annotations

import ast
import functools
import inspect
import random
import re
import time
from pathlib import Path

import pytest

import p2p_engine.errors
import proxy.errors
from p2p_engine.config import EngineConfig
from p2p_engine.engine import P2pNcclEngine
from proxy.app import Proxy
from proxy.config import ProxyConfig
from proxy.http.strict import CODE
from tests.support import CODES_OF_QUART

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SIZING = (ROOT / "docs" / "sizing.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
ALERTS = (ROOT / "deploy" / "helm" / "alerts.yml").read_text()
SCALING = (ROOT / "deploy" / "helm" / "templates" / "autoscaling.yaml").read_text()
DASHBOARDS = [path.read_text() for path in sorted((ROOT / "grafana").glob("*.json"))]
ALL = TEXT + OPERATIONS + SIZING + MODELS
SOURCES = [path for part in ("p2p_engine", "proxy") for path in (ROOT / part).rglob("*.py")]
ENTRY = re.compile(r"^### ([A-Z]\w+)\n\n(.+?)(?=\n##)", re.MULTILINE | re.DOTALL)
ENTRIES = dict(ENTRY.findall(TEXT))
METRIC = re.compile(r"(?:vllm:p2p|p2p_proxy)_\w+")
HISTOGRAM_PARTS = re.compile(r"_(bucket|sum|count)$")
MAKERS = ("ProxyError", "LegFailed", "BodyRefused")


def errors_of(module: object) -> set[str]:
    """Name the error classes that a module defines."""
    return {
        name
        for name, item in vars(module).items()
        if inspect.isclass(item) and item.__module__ == vars(module)["__name__"]
    }


@functools.cache
def literals() -> str:
    """All texts of the code, one in each line; of an f-string the parts between its values."""
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    nodes = (node for tree in trees for node in ast.walk(tree))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    return "\n".join(text for text in texts if isinstance(text, str))


def codes() -> set[str]:
    """The codes of all errors that the proxy makes; those of a leg begin with its role."""
    found: set[str] = {CODE, *CODES_OF_QUART}
    for path in (ROOT / "proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS:
                found |= codes_of(node)
            if isinstance(node, ast.Dict):  # where an error is written before there is a request
                pairs = zip(node.keys, node.values, strict=True)
                found |= {
                    str(v.value) for k, v in pairs if is_code(k) and isinstance(v, ast.Constant)
                }
    return found


def is_code(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "code"


def codes_of(call: ast.Call) -> set[str]:
    code = call.args[1]
    if isinstance(code, ast.Constant):
        return {str(code.value)}
    if isinstance(code, ast.JoinedStr):
        last = code.values[-1]
        ends = [str(last.value)] if isinstance(last, ast.Constant) else ["_timeout", "_failed"]
        return {role + end for role in ("prefill", "decode") for end in ends}
    return set()


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    assert set(ENTRIES) == errors_of(p2p_engine.errors) | errors_of(proxy.errors)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_what_it_means_what_to_look_at_and_what_to_do(name: str) -> None:
    kinds = re.findall(r"^- \*\*(.+?):\*\*", ENTRIES[name], re.MULTILINE)
    assert [kind for kind in kinds if kind != "Says"] == ["Means", "Look at", "Do"]


@pytest.mark.parametrize("quoted", sorted(set(re.findall(r"`([^`]*…[^`]*)`", ALL))))
def test_what_is_quoted_is_what_the_code_says(quoted: str) -> None:
    """Where a value stands in the message, the page has an ellipsis."""
    texts = literals()
    parts = [part.strip(" '\"(){}") for part in re.sub(r"\s+", " ", quoted).split("…")]
    assert [part for part in parts if part not in texts] == []


def test_every_code_of_the_proxy_is_in_the_table() -> None:
    table = TEXT.split("### All codes")[1].split("## ")[0]
    rows = re.findall(r"^\| \d{3}(?:, \d{3})* \| (.+?) \|", table, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == codes()


def test_the_alert_on_failed_requests_knows_every_failure() -> None:
    """By its status, a stream that breaks after its first byte is a success."""
    row = re.search(r'outcome=~"(.+?)"', ALERTS.split("alert: RequestsFail\n")[1])
    assert row is not None
    pattern = row[1]
    legs = {code for code in codes() if code.startswith(("prefill_", "decode_"))}
    found = {code for code in codes() if re.fullmatch(pattern, code)}
    assert found == legs | {"no_instance", "internal_error"}


def test_each_alert_is_told_with_what_it_means_and_what_to_do() -> None:
    rules = re.findall(r'alert: (\w+)\n.+?summary: "(.+?)"\n +runbook: "(.+?)"', ALERTS, re.DOTALL)
    table = OPERATIONS.split("## Alerts")[1].split("\n## ")[0]
    assert len(rules) == ALERTS.count("- alert:")
    assert re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", table, re.MULTILINE) == rules


def metrics_of_an_instance() -> set[str]:
    """As vLLM shows them: a counter's name gets an ending."""
    pytest.importorskip("vllm")
    from p2p_engine.connector.stats import COUNTERS, GAUGES, HISTOGRAMS, REQUEST_COUNTERS

    plain = {f"vllm:{name}" for name in (*GAUGES, *HISTOGRAMS)}
    return {f"vllm:{name}_total" for name in (*COUNTERS, *REQUEST_COUNTERS)} | plain


def metrics_of_the_proxy() -> set[str]:
    """As it shows them; some have no sample yet, but all have a type."""
    proxy = Proxy(ProxyConfig(), time.monotonic, random.Random(0))
    text = proxy._metrics.render().decode()
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_every_metric_of_an_instance_is_explained() -> None:
    table = OPERATIONS.split("## Metrics of an instance")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert set(rows) == metrics_of_an_instance()
    assert len(rows) == len(set(rows))


@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_no_other_metric_of_ours_is_named() -> None:
    text = "".join((ALL, ALERTS, SCALING, *DASHBOARDS))
    named = {HISTOGRAM_PARTS.sub("", name) for name in METRIC.findall(text)}
    assert named - metrics_of_an_instance() - metrics_of_the_proxy() == set()


def test_every_statistic_is_explained() -> None:
    table = OPERATIONS.split("## Statistics of the engine")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    with P2pNcclEngine(EngineConfig(kv_buffer_size=1 << 20, mem_pool_size_gb=0)) as engine:
        known = set(engine.stats())
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == known


@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_every_kind_of_cache_is_listed_as_it_is_treated() -> None:
    pytest.importorskip("vllm")
    from vllm.v1 import kv_cache_interface as kinds

    from p2p_engine.connector.groups import SUPPORTED

    parts = {kinds.KVCacheSpec, kinds.AttentionSpec, kinds.UniformTypeKVCacheSpecs}
    known = {
        item
        for item in vars(kinds).values()
        if inspect.isclass(item) and issubclass(item, kinds.KVCacheSpec) and item not in parts
    }
    supported, refused = MODELS.split("### Supported")[1].split("### Refused at start")
    assert kinds_in(supported) == {kind.__name__ for kind in SUPPORTED}
    assert kinds_in(refused.split("## ")[0]) == {kind.__name__ for kind in known - {*SUPPORTED}}


def kinds_in(text: str) -> set[str]:
    """Name the kinds in the first cells of a table."""
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+Spec)`", row)}
