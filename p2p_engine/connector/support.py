"""vLLM's configuration: refuses unsupported settings at start, and parses our own."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.utils.network_utils import get_ip

from p2p_engine.config import EngineConfig
from p2p_engine.connector import compat
from p2p_engine.connector.serving import supervised_rank
from p2p_engine.control.fleet_key import read_key_file
from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import (
    EXTRA,
    NIXL_NAME,
    TransferConfig,
    read_nixls,
    unread_settings,
)
from p2p_engine.wire.addresses import is_any_address, route_from

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse settings that would give wrong results or hang.

    Raises:
        ConfigError: names the first unsupported setting.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)} is not supported; allowed: 1")
    if getattr(parallel, "enable_elastic_ep", False):
        raise ConfigError(
            "enable_elastic_ep is not supported: data-parallel ranks get new numbers at run time"
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        raise ConfigError(
            "enable_fault_tolerance is not supported: vLLM goes on after a step whose orders and "
            "reports are lost, with blocks that were never computed in its prefix cache"
        )
    model = vllm_config.model_config
    if getattr(model, "enable_sleep_mode", False):
        if not compat.TELLS_OF_SLEEP:
            raise ConfigError(
                "enable_sleep_mode needs vLLM 0.33 or newer: this one takes memory from under "
                "transfers without a word"
            )
        if (backend := getattr(model, "sleep_mode_backend", "cumem")) != "cumem":
            raise ConfigError(f"sleep_mode_backend={backend} is not supported; allowed: cumem")
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    names = getattr(model, "architectures", None) if transfer.kv_connector == NIXL_NAME else None
    if names and names[0].startswith("Step5"):
        raise ConfigError(
            f"{names[0]} under the name {NIXL_NAME} is not supported: vLLM lets NIXL transfer the "
            "summaries of its sparse attention, and refuses us by our own name"
        )
    if transfer.kv_role != "kv_producer" and compat.returns_routed_experts(vllm_config):
        raise ConfigError(
            "enable_return_routed_experts is not supported where KV is loaded: vLLM has no record "
            "of the experts of tokens that it did not compute; allowed: with kv_role kv_producer"
        )


def check_stash(vllm_config: VllmConfig, keeps_last_only: bool) -> None:
    """Refuse `stash_seconds` where an earlier turn's KV could not come back, or its loss would cost
    more than a computation.

    Raises:
        ConfigError: names what is in the way.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    obstacles = {
        "needs kv_role kv_both on prefill: it loads": transfer.kv_role == "kv_producer",
        "needs kv_load_failure_policy recompute on prefill": transfer.kv_role != "kv_consumer"
        and transfer.kv_load_failure_policy != "recompute",
        "does not go with speculative decoding": vllm_config.speculative_config is not None,
        "does not go with sliding windows or states": keeps_last_only,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ConfigError(f"stash_seconds {obstacle}")


def identifies_media(vllm_config: VllmConfig) -> bool:
    """Tell whether equal media have equal identifiers on every instance, and others have others.

    If vLLM caches neither prefixes nor what it makes of media, it does not hash them, but counts
    them.
    """
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    is_cached = media is None or media.mm_processor_cache_gb > 0
    return bool(is_cached or vllm_config.cache_config.enable_prefix_caching)


def directory_port(transfer: KVTransferConfig, parallel: ParallelConfig) -> int:
    """Return the port of this rank's directory: each data-parallel rank has one; 0 is any.

    Raises:
        ConfigError: there is no such port.
    """
    if transfer.kv_port == 0:
        return 0
    port = int(transfer.kv_port) + int(parallel.data_parallel_index)
    if not 0 < transfer.kv_port <= port <= 65535:
        raise ConfigError(
            f"kv_port={transfer.kv_port} for data-parallel rank {parallel.data_parallel_index} is "
            f"not possible: each rank takes kv_port plus its number; allowed: up to 65535, or 0 "
            "for any free port"
        )
    return port


def our_settings(transfer: KVTransferConfig) -> KVTransferConfig:
    """Return vLLM's configuration of us; under NIXL's name, with NIXL's settings as ours.

    Raises:
        ConfigError: as `read_nixls`.
    """
    given = _as_json(transfer)
    read = read_nixls(given, os.environ)
    return transfer if read is given else dataclasses.replace(transfer, **read)


def name_unread_settings(transfer: KVTransferConfig) -> None:
    """Log which of NIXL's settings mean nothing to us."""
    if unread := unread_settings(_as_json(transfer)):
        logger.warning("settings of NixlConnector without effect: %s", ", ".join(unread))


def _as_json(transfer: KVTransferConfig) -> TransferConfig:
    names = ("kv_connector", "kv_port", EXTRA)
    return {name: getattr(transfer, name) for name in names}


def read_config(transfer: KVTransferConfig, num_local_ranks: int = 1) -> EngineConfig:
    """Parse our settings; `kv_buffer_size` also from the top level, where vLLM still has it.

    Raises:
        ConfigError: a key is unknown, a value impossible, the key file cannot be used, or no
            address of this machine is known.
    """
    defaults: dict[str, Any] = {"kv_buffer_size": getattr(transfer, "kv_buffer_size", None)}
    extra = {**defaults, **transfer.kv_connector_extra_config}
    config = EngineConfig.from_extra_config(extra, num_local_ranks=num_local_ranks)
    read_key_file(config.key_file)  # now, not when the model has been loaded
    if extra.get("host"):
        return config
    return dataclasses.replace(config, host=_own_host(config.proxy_hosts))


def _own_host(proxy_hosts: Sequence[str]) -> str:
    """Return vLLM's address of this machine; if it has none, the one from which proxies are
    reached.

    A proxy on this machine would show the loopback address, which other machines cannot use.
    """
    host = get_ip()
    if not is_any_address(host):
        return host
    try:
        seen = {route_from(proxy) for proxy in proxy_hosts}
    except OSError:
        seen = set()
    if len(seen) == 1 and not ipaddress.ip_address(*seen).is_loopback:
        host = seen.pop()
        logger.warning("vLLM knows no address of this machine; host=%s, as the proxy sees it", host)
        return host
    raise ConfigError(
        f"host is required: there is no default route, and vLLM takes {host} for our address; "
        "set it in kv_connector_extra_config to the address by which peers reach this machine "
        "(127.0.0.1 if all of them are on it)"
    )


def num_local_ranks(parallel: ParallelConfig) -> int:
    """Return the number of the instance's ranks on this host, or a bound if vLLM does not state
    it."""
    per_engine = parallel.world_size // getattr(parallel, "nnodes_within_dp", 1)
    num_engines = int(parallel.data_parallel_size_local)
    if parallel.data_parallel_size == 1:
        num_engines = int(getattr(parallel, "elastic_ep_max_dp_size", 1) or 1)
    elif supervised_rank() is not None:  # one server and one engine for each rank
        num_engines = int(parallel.data_parallel_size)
    return max(1, per_engine * num_engines)
