#!/bin/bash
set -euo pipefail
ADDRESS="127.0.0.1"
PORT=21001
BUFFER=2000000000
docker run -d --name prefill --network=host --gpus '"device=0"' --entrypoint bash image:latest -c \
    'exec python3 -m vllm.entrypoints.openai.api_server \
        --model '"${MODEL}"' \
        --port 20001 \
        --kv-transfer-config '"'"'{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2,"kv_ip":"'"${ADDRESS}"'","kv_port":'"${PORT}"',"kv_buffer_size":'"${BUFFER}"'}'"'"' \
        -cc.mode none'
