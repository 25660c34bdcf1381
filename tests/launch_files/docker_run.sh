docker run --rm --device /dev/infiniband/uverbs0 --device=nvidia.com/gpu=all --shm-size 16g \
  -e VLLM_NIXL_SIDE_CHANNEL_HOST="$(hostname -i)" -e VLLM_NIXL_ABORT_REQUEST_TIMEOUT=120 \
  vllm/vllm-openai:v0.18.0 --model some/model \
  --kv_transfer_config.kv_connector=NixlConnector \
  --kv-transfer-config.kv_role kv_both \
  --kv-transfer-config.kv_connector_extra_config.engine_ttl 600 \
  --kv-transfer-config.kv_connector_extra_config.bidirectional_kv_xfer=true
