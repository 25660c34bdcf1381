#!/bin/bash
BUFFER=${BUFFER:-1.0}
ADDRESS=${VLLM_HOST_IP:-$(hostname -I | awk '{print $1}')}
CUDA_VISIBLE_DEVICES=0 \
UCX_NET_DEVICES=all \
vllm serve "$MODEL" \
    --port 20001 \
    --kv-transfer-config '{
        "kv_connector": "P2pNcclConnector",
        "kv_role": "kv_producer",
        "kv_rank": 0,
        "kv_parallel_size": 8,
        "kv_buffer_size": '$BUFFER',
        "kv_ip": "'$ADDRESS'",
        "kv_port": 21001,
        "kv_connector_extra_config": {
            "nccl_num_channels": "8",
            "send_type": "PUT_ASYNC",
            "mem_pool_size_gb": 16,
            "http_port": 20001,
            "proxy_ip": "'$ADDRESS'",
            "proxy_port": "30001"
        }
    }' \
    >prefill.log 2>&1 &
python3 my_proxy.py --host 0.0.0.0 --port 10001 --prefill-servers "localhost:20001"
