#!/bin/bash
# This isn't decode, and once had "kv_parallel_size": 2
vllm serve m --port 20001 --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_port":"21001","kv_connector_extra_config":{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"20001"}}'
