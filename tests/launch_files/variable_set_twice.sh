#!/bin/bash
python "$SRC/my_proxy.py" --http-port 10001 --zmq-port 30001 > proxy.log 2>&1 &
CONFIG='{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":1000000000,"kv_port":21001,"kv_connector_extra_config":{"proxy_ip":"0.0.0.0","proxy_port":"30001","http_port":"20001","send_type":"PUT_ASYNC"}}'
CUDA_VISIBLE_DEVICES=0 vllm serve "$MODEL" --host 0.0.0.0 --port 20001 --trust-remote-code --disable-log-requests --enable-prefix-caching \
    --kv-transfer-config "$CONFIG" > prefill.log 2>&1 &
CONFIG='{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_buffer_size":10000000000,"kv_port":22001,"kv_connector_extra_config":{"proxy_ip":"0.0.0.0","proxy_port":"30001","http_port":"20002","send_type":"PUT_ASYNC"}}'
CUDA_VISIBLE_DEVICES=1 vllm serve "$MODEL" --host 0.0.0.0 --port 20002 --disable-log-requests \
    --kv-transfer-config "$CONFIG" > decode.log 2>&1 &
