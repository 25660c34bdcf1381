# proxy_port is the proxy's HTTP port. No text tells that; doctor asks the port.
p2p-engine proxy --host 127.0.0.1 --port 10001 --registration-host 127.0.0.1 --registration-port 30001 &
p2p-engine doctor --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_port":21001,"kv_connector_extra_config":{"host":"127.0.0.1","proxy_ip":"127.0.0.1","proxy_port":"10001","http_port":20001,"mem_pool_size_gb":1}}'
