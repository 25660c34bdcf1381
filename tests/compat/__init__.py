"""Real boots of the vLLM versions that we support, each in an environment of its own."""
