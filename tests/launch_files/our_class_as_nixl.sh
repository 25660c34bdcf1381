#!/bin/bash
# Our class under the name of vLLM's NixlConnector: its variables mean the same there.
export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7
export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
vllm serve "$MODEL" --kv-transfer-config '{
  "kv_connector": "NixlConnector",
  "kv_connector_module_path": "p2p_engine.connector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {"kv_lease_duration": 45}
}'
