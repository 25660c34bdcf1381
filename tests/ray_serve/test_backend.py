"""Our backend with Ray Serve's own classes: the registry, the configuration and the requests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray makes an environment with Ray")

import ray.serve
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import LLMConfig

from p2p_engine.config import SendMode
from p2p_engine.connector.intent import Direction, Intent, ThisInstance, read_intent
from p2p_engine.integrations.ray_serve import RayServeBackend, register
from p2p_engine.transfer_config import CONNECTOR, EXTRA
from p2p_engine.wire.messages import TransferKey

HOST = "127.0.0.1"


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Ray tells a replica of itself; its number is `replica.rank.rank`."""
    context = SimpleNamespace(rank=SimpleNamespace(rank=0))
    monkeypatch.setattr(ray.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: HOST)
    return context


def make_backend(kv_port: int | None = None, **engine_kwargs: Any) -> RayServeBackend:
    transfer: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    if kv_port is not None:
        transfer["kv_port"] = kv_port
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": "m"},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={"kv_transfer_config": transfer, **engine_kwargs},
    )
    backend = KVConnectorBackendFactory.create_backend(CONNECTOR, config)
    assert isinstance(backend, RayServeBackend)
    backend.setup()
    return backend


def make_request() -> CompletionRequest:
    return CompletionRequest(model="m", prompt=[1, 2, 3], max_tokens=9, stream=True)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    register()  # again is no error
    yield
    KVConnectorBackendFactory.unregister_backend(CONNECTOR)


def test_each_replica_of_a_node_has_a_port_of_its_own(replica: SimpleNamespace) -> None:
    ports = []
    for number in range(3):
        replica.rank.rank = number
        ports.append(make_backend(kv_port=22110).kv_transfer_config["kv_port"])
    assert ports == [22110, 22111, 22112]


@pytest.mark.parametrize("kv_port", [None, 0])
def test_without_a_port_any_free_one_is_taken(
    replica: SimpleNamespace, kv_port: int | None
) -> None:
    backend = make_backend(kv_port)
    config = backend.kv_transfer_config
    assert config["kv_port"] > 0
    assert backend.replica_metadata()["p2p_kv_port"] == config["kv_port"]


def test_the_host_is_the_nodes_unless_one_is_given(replica: SimpleNamespace) -> None:
    backend = make_backend(kv_port=1000)
    assert backend.kv_transfer_config[EXTRA] == {"host": HOST}
    transfer = {"kv_connector": CONNECTOR, "kv_port": 1000, EXTRA: {"host": "10.0.0.9"}}
    given = make_backend(kv_transfer_config=transfer)
    assert given.replica_metadata() == {"p2p_kv_host": "10.0.0.9", "p2p_kv_port": 1000}


def test_a_data_parallel_rank_is_counted_once(replica: SimpleNamespace) -> None:
    """Our connector adds it to `kv_port`; the address has it already."""
    backend = make_backend(kv_port=1000, data_parallel_rank=3)
    assert backend.kv_transfer_config["kv_port"] == 1000
    assert backend.replica_metadata()["p2p_kv_port"] == 1003


def test_both_requests_name_one_transfer_and_each_other(replica: SimpleNamespace) -> None:
    prefill, decode = make_backend(kv_port=21001), make_backend(kv_port=22001)
    peer, request = prefill.replica_metadata(), make_request()
    asked = decode.prepare_prefill_request(request=request, peer=peer)
    loading = decode.prepare_decode_request(request=request, peer=peer, prefill_response=None)
    assert (asked.max_tokens, asked.stream) == (1, False)
    assert (loading.max_tokens, loading.stream) == (9, True)
    assert request.kv_transfer_params is None
    sent, loaded = read(asked, 21001), read(loading, 22001)
    key = TransferKey(asked.kv_transfer_params["transfer_id"])
    assert sent == Intent(Direction.SEND, key, f"{HOST}:22001", SendMode.PUT_ASYNC)
    assert loaded == Intent(Direction.LOAD, key, f"{HOST}:21001", SendMode.PUT_ASYNC)


def test_two_requests_are_two_transfers(replica: SimpleNamespace) -> None:
    backend = make_backend(kv_port=1)
    peer = backend.replica_metadata()
    names = {
        backend.prepare_prefill_request(request=make_request(), peer=peer).kv_transfer_params[
            "transfer_id"
        ]
        for _ in range(2)
    }
    assert len(names) == 2


@pytest.mark.parametrize("peer", [None, {}, {"mori_zmq_address": "x"}])
def test_a_prefill_replica_that_published_no_address_is_named(
    replica: SimpleNamespace, peer: dict[str, Any] | None
) -> None:
    backend, request = make_backend(kv_port=1), make_request()
    with pytest.raises(ValueError, match="published no address"):
        backend.prepare_prefill_request(request=request, peer=peer)
    with pytest.raises(ValueError, match="published no address"):
        backend.prepare_decode_request(request=request, peer=peer, prefill_response=None)


def read(request: Any, kv_port: int) -> Intent | None:
    instance = ThisInstance("kv_both", f"{HOST}:{kv_port}", SendMode.PUT_ASYNC, has_random_ids=True)
    return read_intent("cmpl-x-0-1a2b3c4d", request.kv_transfer_params, instance)
