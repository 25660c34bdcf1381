#!/usr/bin/env bash
# A function prints the JSON of each instance.
ADDRESS="${ADDRESS:-$(hostname -I | awk '{print $1}')}"
REGISTER="${REGISTER:-30001}"
transfer_config() {
  local role="$1" http="$2" kv="$3"
  cat <<JSON
{
  "kv_connector":"P2pNcclConnector",
  "kv_role":"${role}",
  "kv_rank":0,
  "kv_parallel_size":1,
  "kv_ip":"${ADDRESS}",
  "kv_port":${kv},
  "kv_connector_extra_config":{
    "http_port":"${http}",
    "proxy_ip":"${ADDRESS}",
    "proxy_port":"${REGISTER}"
  }
}
JSON
}
( cd examples; nohup python disagg_proxy_p2p_nccl_xpyd.py > proxy.log 2>&1 & )
env CUDA_VISIBLE_DEVICES=1 nohup vllm serve "$MODEL" --port 20002 \
  --kv-transfer-config "$(transfer_config kv_consumer 20002 22001)" >> decode.log 2>&1 &
CUDA_VISIBLE_DEVICES=0 nohup vllm serve "$MODEL" --port 20001 \
  --kv-transfer-config "$(transfer_config kv_producer 20001 21001)" >> prefill.log 2>&1 &
