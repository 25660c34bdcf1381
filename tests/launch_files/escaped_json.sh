#!/bin/bash
# As vLLM's own example began its prefill instances, with a key of a proposal that never was merged.
REGISTER=${REGISTER:-30001}
ASYNC=${ASYNC:-true}
python3 disagg_proxy_p2p_nccl_xpyd.py &
for i in 0; do
    port=$((20001 + i)); kv_port=$((21001 + i))
    CUDA_VISIBLE_DEVICES=$i VLLM_USE_V1=1 vllm serve $MODEL --port $port \
        --kv-transfer-config \
        "{\"kv_connector\":\"P2pNcclConnector\",\"kv_role\":\"kv_producer\",\"kv_buffer_size\":\"1e1\",\"kv_port\":\"$kv_port\",\"enable_async_transfers\":$ASYNC,\"kv_connector_extra_config\":{\"proxy_ip\":\"0.0.0.0\",\"proxy_port\":\"$REGISTER\",\"http_port\":\"$port\",\"send_type\":\"PUT_ASYNC\",\"nccl_num_channels\":\"16\"}}" > prefill$i.log 2>&1 &
done
