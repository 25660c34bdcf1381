#!/bin/bash
# Another module brings a class of this name, so it isn't NIXL's.
config() { echo "{\"kv_connector\":\"NixlConnector\",\"kv_connector_module_path\":\"somebody.connector\",\"kv_role\":\"kv_both\",\"kv_port\":$1,\"kv_connector_extra_config\":{\"host\":\"127.0.0.1\",\"send_type\":\"GET\"}}"; }
vllm serve m --port 20001 --kv-transfer-config "$(config 21001)" > prefill.log 2>&1 &
vllm serve m --port 20002 --kv-transfer-config "$(config 22001)" > decode.log 2>&1 &
