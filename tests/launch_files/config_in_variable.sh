#!/bin/bash
HTTP_PORT="${2:-20002}"
KV_PORT="${3:-22001}"
REGISTER="${REGISTER:-30001}"
CONFIG=$(cat <<EOF
{
  "kv_connector": "P2pNcclConnector",
  "kv_role": "kv_consumer",
  "kv_buffer_size": "8e9",
  "kv_port": "$KV_PORT",
  "kv_connector_extra_config": {
    "proxy_ip": "0.0.0.0",
    "proxy_port": "$REGISTER",
    "http_port": "$HTTP_PORT",
    "send_type": "PUT_ASYNC",
    "nccl_num_channels": "16"
  }
}
EOF
)
ONE_LINE=$(echo "$CONFIG" | tr -d '\n' | tr -s ' ')
CUDA_VISIBLE_DEVICES=1 vllm serve "$MODEL" --enforce-eager --port $HTTP_PORT \
    --kv-transfer-config "$ONE_LINE" --enable-lora 2>&1 | tee decode.log
