"""Stand-ins for vLLM instances: a real HTTP server, real heartbeats and real transfers of KV that
was made up from the prompt. No model and no vLLM; `p2p-engine simulate` starts fleets of them."""
