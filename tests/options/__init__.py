"""Every option of vLLM's that could touch the model, changed on one side of a pair."""
