#!/bin/bash
# Two instances and our proxy with their addresses: nothing is old here.
PYTHON=${VENV:?a virtual environment}/bin/python
$PYTHON -m vllm.entrypoints.openai.api_server --model $MODEL --port 20001 --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_port":21001,"engine_id":"prefill","kv_connector_extra_config":{"host":"127.0.0.1"}}' > prefill.log 2>&1 &
$PYTHON -m vllm.entrypoints.openai.api_server --model $MODEL --port 20002 --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_port":22001,"engine_id":"decode","kv_connector_extra_config":{"host":"127.0.0.1","kv_buffer_size":"8e9"}}' > decode.log 2>&1 &
p2p-engine proxy --host 127.0.0.1 --port 10001 --prefill 127.0.0.1:20001@127.0.0.1:21001 --decode 127.0.0.1:20002@127.0.0.1:22001 > proxy.log 2>&1 &
