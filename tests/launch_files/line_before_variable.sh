#!/bin/bash
for i in 0 1 2; do
    port=$((20005 + 2*i)); kv_port=$((22001 + i)); gpu=$i
    echo "  Decode $((i+1)): GPU $gpu, port $port, KV port $kv_port"
    VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=$gpu vllm serve $MODEL \
        --port $port \
        --kv-transfer-config \
        "{\"kv_connector\":\"P2pNcclConnector\",\"kv_role\":\"kv_consumer\",\"kv_buffer_size\":\"8e9\",\"kv_port\":\"$kv_port\",\"kv_connector_extra_config\":{\"proxy_ip\":\"0.0.0.0\",\"proxy_port\":\"30001\",\"http_port\":\"$port\"}}" > decode$i.log 2>&1 &
done
