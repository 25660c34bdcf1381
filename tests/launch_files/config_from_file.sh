#!/bin/bash
echo "decode with P2pNcclConnector"
vllm serve some/model --swap-space 4 --kv-transfer-config "$(cat /etc/vllm/decode.json)"
