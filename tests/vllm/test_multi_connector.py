"""Beside other connectors in vLLM's MultiConnector: KV moves in either order, or it is refused.

OffloadingConnector is not here: it needs a GPU.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine import FinishReason

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import CHILDREN, CLASHING, CONNECTOR, EXTRA, MULTI
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask_all
from tests.support import SeededRandom
from tests.vllm import sibling_connector
from tests.vllm.instance import HOST, VllmInstance, distributed_environment
from tests.vllm.load import CONCURRENCY, ENVIRONMENT, check_nothing_held, check_transferred

PLACES = pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "ours last"])
KINDS = pytest.mark.parametrize("kind", ["HandshakingConnector", "SilentConnector"])


def sibling(kind: str, **more: str) -> dict[str, Any]:
    """The settings of a connector beside ours."""
    return {"kv_connector": kind, "kv_connector_module_path": sibling_connector.MODULE, **more}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with distributed_environment(tmp_path_factory.mktemp("distributed")):
        yield


def instance(kv_role: str, kv_port: int, kind: str, *, is_first: bool) -> VllmInstance:
    beside = [sibling(kind, kv_role=kv_role)]
    return VllmInstance(ensure_tiny_model(), kv_role, kv_port, beside=beside, is_first=is_first)


def step_while_idle(made: VllmInstance) -> None:
    """As vLLM's engine core before the first request: it steps as long as it is told to."""
    made.step_until(lambda: not made.scheduler.has_requests())


@PLACES
@KINDS
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.usefixtures("one_rank")
def test_kv_moves_whoever_is_first(kind: str, is_first: bool, rng: SeededRandom) -> None:
    with PortPlan(HOST) as ports:
        prefill = instance("kv_producer", ports.take(), kind, is_first=is_first)
        decode = instance("kv_consumer", ports.take(), kind, is_first=is_first)
    for made in (prefill, decode):
        step_while_idle(made)
    prompt = [rng.randrange(3, 900) for _ in range(200)]
    prefill.add("alone", prompt)
    assert prefill.finish("alone") is FinishReason.LENGTH
    params = {"transfer_id": uuid.UUID(int=rng.getrandbits(128)).hex, "remote_host": HOST}
    loads = {"do_remote_prefill": True, "remote_port": prefill.kv_port, **params}
    sends = {"do_remote_decode": True, "remote_port": decode.kv_port, **params}
    decode.add("moved", prompt, loads)
    prefill.add("moved", prompt, sends, max_tokens=1)

    def ended() -> bool:
        prefill.step()
        return decode.finish_reason("moved") is not None

    decode.step_until(ended)
    assert decode.finish_reason("moved") is FinishReason.LENGTH
    assert decode.tokens("moved") == prefill.tokens("alone")
    assert decode.num_computed_tokens["moved"] <= 4  # the last of the prompt, and its own
    for made in (prefill, decode):
        made.close()


@PLACES
@pytest.mark.parametrize("kind", ["NixlBaseConnector", "P2pNcclConnector"])
@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.usefixtures("one_rank")
def test_one_that_answers_with_our_keys_is_refused(
    kind: str, is_first: bool, free_port: int
) -> None:
    beside = sibling(kind, kv_role="kv_both")
    if kind == "P2pNcclConnector":
        beside["kv_connector_module_path"] = "tests.vllm.cli_corrupting_connector"
    with pytest.raises(ConfigError, match=f"{kind} beside P2pNcclConnector"):
        VllmInstance(ensure_tiny_model(), "kv_both", free_port, beside=[beside], is_first=is_first)


def test_those_that_are_refused_are_known_by_their_names() -> None:
    """So that `doctor` knows without loading them."""
    for name, load_class in KVConnectorFactory._registry.items():
        with contextlib.suppress(ImportError):
            bases = {base.__name__ for base in load_class().__mro__}
            assert (name in CLASHING) == bool(bases & CLASHING), name


@marks.vllm
@marks.slow
@PLACES
@pytest.mark.timeout(1800)
def test_real_instances_say_what_one_alone_says(
    is_first: bool,
    load: list[Question],
    answers_alone: Callable[..., list[Answer]],
    tmp_path: Path,
) -> None:
    """The launcher gives our entry what it would give to us alone."""
    questions = load[:40]
    entries = [{"kv_connector": CONNECTOR}, sibling("HandshakingConnector")]
    config = {"kv_connector": MULTI, EXTRA: {CHILDREN: entries if is_first else entries[::-1]}}
    with Fleet(
        ensure_tiny_model(),
        vllm_args=VLLM_ARGS,
        transfer_config=config,
        env=ENVIRONMENT,
        log_dir=tmp_path,
    ) as fleet:
        fleet.start_proxy()
        for role in (MemberRole.PREFILL, MemberRole.DECODE):
            fleet.start(role)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        assert fleet.proxy is not None
        answers = ask_all(fleet.proxy.url, questions, concurrency=CONCURRENCY)
        check_transferred(fleet.instances, questions)
        check_nothing_held(fleet.instances)
    assert answers == answers_alone()[: len(questions)]
