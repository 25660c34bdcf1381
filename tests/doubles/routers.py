"""The routers in front of vLLM: of each, the two requests that it sends for one of a client's.

Read from the sources that docs/integrations.md names. An object serves one request; `memory` is
what its router keeps between requests.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

TO_PREFILL: Json = {"do_remote_decode": True, "do_remote_prefill": False}
TO_DECODE: Json = {"do_remote_decode": False, "do_remote_prefill": True}
NULLS: Json = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
NOTIFY_PORT = 61005  # MoRIIO's default


class RouterRefused(Exception):
    """The router itself turns the instances away; the message is its own."""


@dataclass(frozen=True)
class Served:
    """An instance as a router is told of it: two addresses, as host:port."""

    http_address: str
    kv_address: str

    @property
    def host(self) -> str:
        return self.kv_address.rpartition(":")[0]

    @property
    def kv_port(self) -> int:
        return int(self.kv_address.rpartition(":")[2])


class LlmdSidecar:
    """llm-d's sidecar in its default mode, which KServe also starts: vLLM's NIXL handshake."""

    is_concurrent = False  # whether both requests leave at once
    is_told_by_heartbeats = False  # instances register with it

    def __init__(self, prefill: Served, decode: Served, memory: Json | None = None) -> None:
        self.prefill, self.decode = prefill, decode
        self.memory = memory if memory is not None else {}
        self.request_id = str(uuid.uuid4())

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Request-Id": self.request_id}

    def prefill_params(self) -> Json | None:
        return {**TO_PREFILL, **NULLS}

    def decode_params(self, answered: Json | None) -> Json | None:
        """`answered`: what prefill answered; None if nothing, or if decode does not wait for it."""
        return answered

    def take_answer(self, answered: Json | None) -> None:
        """Look at what prefill answered, before decode's answer is passed on.

        Raises:
            RouterRefused: the router does not go on from there.
        """

    def prefill_body(self, body: Json) -> Json:
        kept = {key: value for key, value in body.items() if key != "stream_options"}
        return with_params({**kept, "max_tokens": 1, "stream": False}, self.prefill_params())

    def decode_body(self, body: Json, answer: Json | None) -> Json:
        answered = answer.get("kv_transfer_params") if answer is not None else None
        return with_params(body, self.decode_params(answered))


class LlmdCoordinator(LlmdSidecar):
    """llm-d's coordinator. A chat goes to prefill whole, of a completion only model and prompt."""

    def prefill_body(self, body: Json) -> Json:
        kept: Json = {name: body[name] for name in ("model", "prompt") if name in body}
        return super().prefill_body(kept if "prompt" in body else body)

    def decode_params(self, answered: Json | None) -> Json:
        return {**(answered or {}), **TO_DECODE}


class LlmdNixlPush(LlmdSidecar):
    """llm-d's sidecar in front of NIXL's push connector. Once an instance has answered as one that
    pushes, both requests leave at once."""

    def __init__(self, prefill: Served, decode: Served, memory: Json | None = None) -> None:
        super().__init__(prefill, decode, memory)
        self.transfer_id = f"xfer-{uuid.uuid4()}"

    @property
    def is_concurrent(self) -> bool:  # type: ignore[override]
        return bool(self.memory)

    def prefill_params(self) -> Json:
        return {**TO_PREFILL, **NULLS, "transfer_id": self.transfer_id}

    def decode_params(self, answered: Json | None) -> Json:
        if answered is None:
            own = {"remote_request_id": self.request_id, "transfer_id": self.transfer_id}
            return {**self.memory, **TO_DECODE, **own}
        return {**answered, "transfer_id": self.transfer_id}

    def take_answer(self, answered: Json | None) -> None:
        names = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "transfer_mode")
        identity = {name: (answered or {}).get(name) for name in names}
        is_whole = all(isinstance(value, str | int) for value in identity.values())
        if is_whole and identity["transfer_mode"] == "push":
            self.memory.update(identity)


class LlmdNextTurn(LlmdSidecar):
    """llm-d's sidecar in a conversation's second turn: what decode answered to the first comes with
    the prefill request, in the form in which vLLM's NIXL connector answers."""

    def prefill_params(self) -> Json:
        return {
            **TO_PREFILL,
            "remote_engine_id": "decode-engine",
            "remote_request_id": "cmpl-earlier-0-1a2b3c4d",
            "remote_host": self.decode.host,
            "remote_port": self.decode.kv_port,
            "remote_block_ids": [[1, 2, 3]],
            "remote_num_tokens": 48,
            "remote_blocks_expiry_time": 1234.5,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
        }


class LlmdMoriio(LlmdSidecar):
    """llm-d's sidecar with --moriio-write-mode, its handshake ports set to our `kv_port`s."""

    num_ranks = 1  # --moriio-dp-size
    rank = 0  # of both sides, also in a header

    @property
    def transfer_id(self) -> str:
        return f"tx{self.request_id}"

    def prefill_params(self) -> Json:
        return {
            **TO_PREFILL,
            **NULLS,
            "remote_host": self.decode.host,
            **self._ports(self.decode),
            "tp_size": 1,
            "remote_dp_size": self.num_ranks,
        }

    def decode_params(self, answered: Json | None) -> Json:
        missing = {**self._ports(self.decode), "remote_dp_size": self.num_ranks}
        pinned = {"remote_dp_rank": self.rank, "remote_dp_rank_override": True}
        return {**missing, **(answered or {}), **pinned}

    def _ports(self, peer: Served) -> Json:
        return {
            "remote_notify_port": NOTIFY_PORT,
            "remote_dp_rank": self.rank,
            "remote_dp_rank_override": True,
            "remote_handshake_port": peer.kv_port,
            "transfer_id": self.transfer_id,
        }


class LlmdMoriioAtOnce(LlmdMoriio):
    """The same with --moriio-parallel-dispatch."""

    is_concurrent = True

    def decode_params(self, answered: Json | None) -> Json:
        return {
            **TO_DECODE,
            "remote_engine_id": self.prefill.kv_address,
            "remote_block_ids": [],
            "remote_host": self.prefill.host,
            "remote_port": self.prefill.kv_port,
            **self._ports(self.prefill),
            "tp_size": 1,
            "remote_dp_size": self.num_ranks,
            "is_request_leader": True,
        }


class LlmdMooncake(LlmdSidecar):
    """llm-d's sidecar with --kv-connector=mooncake, as far as our instances would let it come: the
    sidecar first asks the prefill instance's bootstrap server, which we do not have."""

    is_concurrent = True

    def __init__(self, prefill: Served, decode: Served, memory: Json | None = None) -> None:
        super().__init__(prefill, decode, memory)
        self.transfer_id = f"xfer-{uuid.uuid4()}"

    def prefill_params(self) -> Json:
        return {**TO_PREFILL, "transfer_id": self.transfer_id}

    def decode_params(self, answered: Json | None) -> Json:
        return {
            **TO_DECODE,
            "transfer_id": self.transfer_id,
            "remote_bootstrap_addr": f"http://{self.prefill.host}:8998",
            "remote_engine_id": "prefill-engine",
        }


class SmgMooncake(LlmdMooncake):
    """smg, its workers labelled MooncakeConnector: the same, one request after the other."""

    is_concurrent = False


class VllmRouterAtUrls(LlmdSidecar):
    """vllm-router with the URLs of its instances: NIXL's parameters, and an id of the old scheme
    that names HTTP servers where the scheme names `kv_port`s."""

    def __init__(self, prefill: Served, decode: Served, memory: Json | None = None) -> None:
        super().__init__(prefill, decode, memory)
        names = self._names()
        self.request_id = f"___prefill_addr_{names[0]}___decode_addr_{names[1]}_{uuid.uuid4().hex}"

    def _names(self) -> tuple[str, str]:
        return self.prefill.http_address, self.decode.http_address


class VllmRouterDiscovery(VllmRouterAtUrls):
    """vllm-router that is told of its instances by their heartbeats."""

    is_told_by_heartbeats = True

    def _names(self) -> tuple[str, str]:
        return self.prefill.kv_address, self.decode.kv_address


class ProductionStack(LlmdSidecar):
    """production-stack's orchestrated routing: the host of prefill's URL replaces what it said."""

    def decode_params(self, answered: Json | None) -> Json | None:
        host = self.prefill.http_address.rpartition(":")[0]
        return {**answered, "remote_host": host} if answered else None


class ProductionStackPassingIds(ProductionStack):
    """The same, with a client's own request id, which names both instances as our proxy's does."""

    def __init__(self, prefill: Served, decode: Served, memory: Json | None = None) -> None:
        super().__init__(prefill, decode, memory)
        names = f"___prefill_addr_{prefill.kv_address}___decode_addr_127.0.0.1:9"
        self.request_id = f"{names}_{uuid.uuid4().hex}"


class AibrixShfs(ProductionStack):
    """AIBrix with its default connector type, shfs: the pod's address replaces prefill's host."""


class AibrixNixl(LlmdSidecar):
    """AIBrix with the connector type nixl, which is that of another engine."""

    def prefill_params(self) -> None:
        return None

    def decode_body(self, body: Json, answer: Json | None) -> Json:
        return {**body, "disagg_prefill_resp": answer}


class SmgNixl(LlmdSidecar):
    """smg, its workers labelled NixlConnector."""

    def prefill_params(self) -> Json:
        return dict(TO_PREFILL)


class SmgUnlabelled(LlmdSidecar):
    """smg with a connector that it does not know: it passes on what prefill answers of itself."""

    def prefill_params(self) -> None:
        return None


class SmgMoriio(LlmdSidecar):
    """smg, its workers labelled MoRIIOConnector, mode write, both ports set to `kv_port`."""

    def __init__(self, prefill: Served, decode: Served, memory: Json | None = None) -> None:
        super().__init__(prefill, decode, memory)
        self.transfer_id = f"tx-{uuid.uuid4().hex}"

    def prefill_params(self) -> Json:
        return {**TO_PREFILL, **self._peer(self.decode)}

    def take_answer(self, answered: Json | None) -> None:
        given = answered or {}
        for name in ("engine_id", "block_ids", "host", "handshake_port", "notify_port"):
            if given.get(f"remote_{name}") is None:
                raise RouterRefused(f"handoff is missing remote_{name}")
        if given.get("transfer_id") != self.transfer_id or not given.get("do_remote_prefill"):
            raise RouterRefused("the handoff is not for this request")

    def _peer(self, peer: Served) -> Json:
        return {
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": self.transfer_id,
            "remote_dp_size": 1,
            "remote_host": peer.host,
            "remote_handshake_port": peer.kv_port,
            "remote_notify_port": peer.kv_port,
        }


class SmgMoriioAtOnce(SmgMoriio):
    """The same with the label moriio_write_dispatch=concurrent."""

    is_concurrent = True

    def take_answer(self, answered: Json | None) -> None:
        super().take_answer(answered)
        assert answered is not None
        ports = {answered["remote_handshake_port"], answered["remote_notify_port"]}
        if ports != {self.prefill.kv_port}:
            raise RouterRefused("prefill reports another side channel than decode was told")

    def decode_params(self, answered: Json | None) -> Json:
        return {**TO_DECODE, **self._peer(self.prefill)}


class RayServeDefault(LlmdSidecar):
    """Ray Serve LLM with a connector that has no backend of its own."""


class DynamoNixl(LlmdSidecar):
    """Dynamo, if `KV_CONNECTOR_PROTOCOLS` had an entry for us; without one it refuses to start."""


def with_params(body: Json, params: Json | None) -> Json:
    return body if params is None else {**body, "kv_transfer_params": params}
