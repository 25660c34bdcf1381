"""An operator sees who refuses whom, and why: in the proxy's status, in a metric, and by doctor."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from p2p_engine.peers import directory
from tests import marks
from tests.doubles.instance import InstanceDouble
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.doubles.vllm_config import write_model_config
from tests.rigs.proxies import LoopThread, RunningProxy, running_proxy

pytestmark = marks.simulated_vllm

ABSENT = "(default, or accepted)"
WIDE = {"rms_norm_eps": 1e-3, "rope_theta": 5e5}


class SeenPair:
    """A proxy, and what its status says of each instance."""

    def __init__(self, loop: LoopThread, proxy: RunningProxy) -> None:
        self._loop = loop
        self._proxy = proxy
        port = int(proxy.registration_address.rpartition(":")[2])
        self.settings = {"proxy_ip": "127.0.0.1", "proxy_port": port, "http_host": "127.0.0.1"}

    def of(self, instance: InstanceDouble) -> dict[str, Any]:
        """What the status shows of an instance; {} while it is not known."""
        status = self._loop.run(self._proxy.status())
        known: dict[str, dict[str, Any]]
        known = {shown["zmq_address"]: shown for shown in status["instances"]}
        return known.get(instance.address, {})

    def until(self, instance: InstanceDouble, is_so: Callable[[dict[str, Any]], bool]) -> Any:
        """Wait for a heartbeat after which the status shows it."""
        deadline = time.monotonic() + 20
        while not (is_so(shown := self.of(instance))):
            assert time.monotonic() < deadline, shown
            time.sleep(0.01)
        return shown


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[SeenPair]:
    monkeypatch.setattr(directory, "HEARTBEAT_SECONDS", 0.05)
    loop, running = LoopThread(), running_proxy()
    with contextlib.closing(loop):
        proxy = loop.run(running.__aenter__())
        yield SeenPair(loop, proxy)
        loop.run(running.__aexit__(None, None, None))


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """A model that computes otherwise, and keeps its KV in the same way."""
    return write_model_config(tmp_path, **WIDE)


def make_watched(make_pair: MakePair, watched: SeenPair, decode: Any = (), **settings: Any) -> Pair:
    """A pair whose instances register; decode computes what does not come."""
    common = {**watched.settings, "policy": "recompute", **settings}
    return make_pair({"http_port": 1}, {"http_port": 2, **dict(decode)}, **common)


def ask(pair: Pair) -> None:
    pair.ask(prompt_of(100), order="together")
    pair.run()
    pair.check_answers()


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_the_status_names_who_is_refused_and_each_field(
    make_pair: MakePair, watched: SeenPair, other_model: Path, send_type: str
) -> None:
    other = {"model": other_model}
    # With GET, prefill does not hear of the refusal, and holds the KV until its lease ends.
    pair = make_watched(make_pair, watched, other, send_type=send_type, lease_seconds=1)
    ask(pair)
    values = [(ABSENT, "0.001"), (ABSENT, "500000")]
    sides = [(pair.d, pair.p, [(there, here) for here, there in values])]
    if send_type != "GET":  # prefill asks for decode, too
        sides.append((pair.p, pair.d, values))
    for asks, asked, (eps, theta) in sides:
        shown = watched.until(asks, lambda shown: "refuses" in shown.get("warning", ""))
        assert shown["warning"] == (
            f"refuses {asked.address}: hf.rms_norm_eps: {named(eps)}; hf.rope_theta: {named(theta)}"
        )


def test_a_refusal_ends_when_the_peer_comes_back_alike(
    make_pair: MakePair, watched: SeenPair, other_model: Path
) -> None:
    pair = make_watched(make_pair, watched, {"model": other_model}, send_type="PUT_ASYNC")
    ask(pair)
    watched.until(pair.p, lambda shown: "refuses" in shown.get("warning", ""))
    pair.d.close()
    port = int(pair.d.address.rpartition(":")[2])
    model = Path(pair.p.config.model_config.model)
    settings: dict[str, Any] = {**watched.settings, "http_port": 2, "policy": "recompute"}
    pair.d = InstanceDouble(model, "kv_consumer", port, send_type="PUT_ASYNC", **settings)
    ask(pair)
    watched.until(pair.p, lambda shown: shown.get("warning") == "")


def test_accepted_differences_are_in_the_status_and_in_the_line_of_the_start(
    make_pair: MakePair, watched: SeenPair, other_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("vllm", "p2p_engine"):  # ours follows vLLM's
        caplog.set_level(logging.INFO, logger=name)
    accepted = ["hf.rms_norm_eps", "hf.rope_theta", "weights"]
    both = {"accept_differences": accepted, "send_type": "PUT_ASYNC"}
    pair = make_watched(make_pair, watched, {"model": other_model}, **both)
    ask(pair)
    pair.check_answers(num_computed=1)
    for instance in (pair.p, pair.d):
        shown = watched.until(instance, bool)
        assert shown["accept_differences"] == ", ".join(accepted)
        assert shown["warning"] == ""
        starts = [text for text in caplog.messages if f"ready: address={instance.address}" in text]
        assert [text.rpartition(" ")[2] for text in starts] == [
            f"accept_differences={','.join(accepted)}"
        ]


def test_the_status_says_what_weights_are_called(make_pair: MakePair, watched: SeenPair) -> None:
    pair = make_watched(make_pair, watched)
    before = watched.until(pair.d, lambda shown: "weights" in shown)["weights"]
    assert watched.until(pair.p, lambda shown: shown.get("weights") == before)
    pair.d.connector.weights_labelled("step-42")
    watched.until(pair.d, lambda shown: shown["weights"] == "step-42")
    assert pair.d.scheduler.reset_prefix_cache(reset_connector=True)
    watched.until(pair.d, lambda shown: shown["weights"].startswith("unknown-"))
    assert watched.of(pair.p)["weights"] == before


def test_unknown_weights_are_in_the_status_until_they_are_named(
    make_pair: MakePair, watched: SeenPair
) -> None:
    pair = make_watched(make_pair, watched)
    watched.until(pair.d, lambda shown: shown.get("warning") == "")
    assert pair.d.scheduler.reset_prefix_cache(reset_connector=True)
    watched.until(pair.d, lambda shown: shown["warning"].startswith("vLLM has reset its caches"))
    pair.d.connector.weights_labelled("step-42")
    watched.until(pair.d, lambda shown: shown["warning"] == "")
    assert watched.of(pair.p)["warning"] == ""


def named(values: tuple[str, str]) -> str:
    """How a refusal names two values."""
    return "{!r} here, {!r} there".format(*values)
