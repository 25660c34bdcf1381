"""Stand-ins for vLLM instances: a real HTTP server, real heartbeats and real transfers of KV that
is computed from the prompt. They need no model and no vLLM; `p2p-engine simulate` starts fleets of
them."""
