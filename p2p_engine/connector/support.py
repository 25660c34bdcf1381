"""vLLM's configuration: what of it we refuse by name at start, and our own settings in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vllm.utils.network_utils import get_ip

from p2p_engine.config import EngineConfig
from p2p_engine.errors import ConfigError
from p2p_engine.keys import read_key_file

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse what would give wrong results or hang.

    Raises:
        ConfigError: names the first thing that is not supported.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)} is not supported; allowed: 1")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError("enable_sleep_mode is not supported")


def rank_behind_address(vllm_config: VllmConfig, transfer: KVTransferConfig) -> int | None:
    """Which of several data-parallel ranks behind one HTTP address this is, as vLLM's server there
    counts them; None: it has that address for itself.

    Dense models lose their data_parallel_size on the way to a rank, but the id tells it.
    """
    parallel = vllm_config.parallel_config
    has_rank_id = re.search(r"_dp\d+$", transfer.engine_id or "") is not None
    is_one_of_many = parallel.data_parallel_size > 1 or has_rank_id
    if not is_one_of_many or parallel.data_parallel_external_lb:
        return None
    if parallel.data_parallel_hybrid_lb:  # its server has the ranks of this host only
        return parallel.data_parallel_rank_local
    return parallel.data_parallel_index


def read_config(transfer: KVTransferConfig) -> EngineConfig:
    """Parse our settings; `kv_buffer_size` also from the top level, where vLLM still has it.

    Raises:
        ConfigError: a key is unknown, a value impossible, or the key file cannot be used.
    """
    defaults: dict[str, Any] = {"kv_buffer_size": getattr(transfer, "kv_buffer_size", None)}
    extra = {**defaults, **transfer.kv_connector_extra_config}
    if not extra.get("host"):
        extra["host"] = get_ip()
    config = EngineConfig.from_extra_config(extra)
    read_key_file(config.key_file)  # now, not when the model has been loaded
    return config
