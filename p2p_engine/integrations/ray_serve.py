"""Ray Serve LLM: gives each replica an address of its own, and lets prefill push to decode.

Only processes that have Ray import it. `register` is called on the driver, before the application
is built; from then on, Ray makes a `RayServeBackend` in each replica.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    base_prefill_kv_transfer_params,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.utils.server_utils import get_serve_request_id

from p2p_engine.transfer_config import CONNECTOR, EXTRA

_HOST, _PORT = "p2p_kv_host", "p2p_kv_port"  # of a replica, as its peers know it


def register() -> None:
    """Register the backend for every process of the Ray cluster; idempotent."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        path = f"{RayServeBackend.__module__}:{RayServeBackend.__name__}"
        KVConnectorBackendFactory.register_backend(CONNECTOR, path)


class RayServeBackend(BaseConnectorBackend):
    """Of one replica: its address, and the two requests that it makes of a client's.

    The decode replica that a client's request comes to chooses the prefill replica first. So each
    is told the other's address, and both requests leave at once.
    """

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Set `kv_port` and `host` of this replica; Ray starts the engine after it.

        A `kv_port` that is given is the first of a range, one for each replica of the deployment.
        Without one, or with 0, the replica takes a port that is free now; should another process
        take it before the engine does, the start fails and Ray starts the replica again.
        """
        config = self.kv_transfer_config
        host = config.setdefault(EXTRA, {}).setdefault("host", ray.util.get_node_ip_address())
        first = int(config.get("kv_port") or 0)
        port = first + self._compute_port_offset() if first else _free_port(host)
        # Our connector itself adds the number of a data-parallel rank.
        config["kv_port"] = port - int(self.llm_config.engine_kwargs.get("data_parallel_rank") or 0)
        self._address = {_HOST: host, _PORT: port}

    def replica_metadata(self) -> dict[str, Any]:
        """Return what the replicas of the other role are told of this one."""
        return dict(self._address)

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """Return the request that makes prefill push to this replica."""
        _check_peer(peer)
        asked = request.model_copy(deep=True)
        asked.kv_transfer_params = {
            **base_prefill_kv_transfer_params(),
            **_named(request, self._address),
        }
        clamp_request_to_single_token(asked)
        return asked

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any | None
    ) -> Any:
        """Return the request that takes what the chosen prefill replica pushes."""
        asked = request.model_copy(deep=True)
        asked.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "stash": False,  # Ray tells no prefill replica of a session's last turn
            **_named(request, _check_peer(peer)),
        }
        return asked


def _named(request: Any, peer: dict[str, Any]) -> dict[str, Any]:
    """Return the transfer's name, which both requests derive from the client's, and the peer."""
    source = getattr(request, "request_id", None) or get_serve_request_id()
    if not source:
        raise ValueError("a request without an id: its two halves could not be told together")
    transfer_id = hashlib.blake2b(str(source).encode(), digest_size=16).hexdigest()
    return {
        "transfer_id": transfer_id,
        "remote_host": peer[_HOST],
        "remote_port": peer[_PORT],
    }


def _check_peer(peer: dict[str, Any] | None) -> dict[str, Any]:
    if not peer or _HOST not in peer:
        raise ValueError(
            f"the prefill replica published no address: is {CONNECTOR} its kv_connector, "
            "outside of a MultiConnector?"
        )
    return peer


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
