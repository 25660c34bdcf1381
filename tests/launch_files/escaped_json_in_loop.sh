#!/bin/bash
python3 ../examples/disagg_prefill_proxy_xpyd.py &
for i in 0 1; do
    port=$((20001 + i)); kv_port=$((21001 + i))
    CUDA_VISIBLE_DEVICES=$i VLLM_USE_V1=1 vllm serve $MODEL --port $port \
        --kv-transfer-config \
        "{\"kv_connector\":\"P2pNcclConnector\",\"kv_role\":\"kv_producer\",\"kv_buffer_size\":\"1e1\",\"kv_port\":\"$kv_port\",\"kv_connector_extra_config\":{\"proxy_ip\":\"0.0.0.0\",\"proxy_port\":\"30001\",\"http_port\":\"$port\",\"send_type\":\"PUT_ASYNC\",\"nccl_num_channels\":\"16\"}}" > prefill$i.log 2>&1 &
done
