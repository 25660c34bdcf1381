"""vLLM's own connector tests, fetched when run and held against our connector."""
