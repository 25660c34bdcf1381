"""What files for vLLM's old P2pNcclConnector and NixlConnector have, and what to write instead."""

from __future__ import annotations

from p2p_engine.transfer_config import CONNECTOR, EXTRA

_REFUSED = "remove it; vLLM refuses this key since 0.32"
# Keys beside `kv_connector`.
REMOVED_KEYS = {
    "enable_async_transfers": "remove it; vLLM refuses this key, and the default sends so",
    "kv_buffer_size": f"move it into {EXTRA}; vLLM refuses it here since 0.32",
    "kv_ip": f"{_REFUSED}. An instance's own address is VLLM_HOST_IP, or host in {EXTRA}",
    "kv_parallel_size": _REFUSED,
    "kv_rank": _REFUSED,
}

_NO_OPTION = "remove it; vLLM has no such option any more"
REMOVED_OPTIONS = {
    "cuda_graph_sizes": _NO_OPTION,
    "device": _NO_OPTION,
    "disable_async_output_proc": _NO_OPTION,
    "disable_frontend_multiprocessing": _NO_OPTION,
    "disable_log_request": _NO_OPTION,
    "disable_log_requests": _NO_OPTION,
    "guided_decoding_backend": _NO_OPTION,
    "max_seq_len_to_capture": _NO_OPTION,
    "num_scheduler_steps": _NO_OPTION,
    "preemption_mode": _NO_OPTION,
    "scheduler_delay_factor": _NO_OPTION,
    "swap_space": _NO_OPTION,
    "task": _NO_OPTION,
    "use_v2_block_manager": _NO_OPTION,
    "worker_use_ray": _NO_OPTION,
}
# Other programs have options of these names; vLLM's had one of these values.
VALUES_OF_VLLM = {
    "device": {"auto", "cpu", "cuda", "hpu", "neuron", "tpu", "xpu"},
    "task": {"auto", "classify", "embed", "embedding", "generate", "reward", "score"},
}

REMOVED_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "remove it; vLLM reads its option --attention-backend instead",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "remove it; transfers have ids of their own",
    "VLLM_USE_V1": "remove it; vLLM has no other engine any more",
}

_OTHER_NAME = f"write {CONNECTOR}"
NIXL_CONNECTORS = {
    "NixlConnector": f'{_OTHER_NAME}, and "send_type": "GET" in {EXTRA} behind a router that '
    "speaks NIXL's handshake",
    "NixlPullConnector": f'{_OTHER_NAME}, and "send_type": "GET" in {EXTRA}',
    "NixlPushConnector": f"{_OTHER_NAME}; its default is to push",
}
# Variables, and keys of `kv_connector_extra_config` but for `enable_permute_local_kv`.
NIXL_SETTINGS = {
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": f"write lease_seconds in {EXTRA}",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": f"write VLLM_HOST_IP, or host in {EXTRA}; never 0.0.0.0",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "write kv_port beside kv_connector",
    "backends": "remove it; transports says how KV moves, and its default needs no NIXL",
    "bidirectional_kv_xfer": "write stash_seconds, on prefill and decode",
    "decoder_kv_blocks_ttl": "write stash_seconds, on prefill and decode",
    "enable_cross_layers_blocks": "remove it; there is no such setting",
    "enable_permute_local_kv": "remove it; other layouts are converted without it",
    "enforce_handshake_compat": "remove it; accept_differences names what peers need not share",
    "engine_ttl": "remove it; a link on which nothing is open rests",
    "kv_lease_duration": "write lease_seconds",
    "kv_recompute_threshold": "remove it; there is no such setting",
    "num_threads": "remove it; one thread of each engine moves the bytes",
    "push_registration_timeout": "write transfer_timeout_seconds; its default is 60",
}
