"""With Ray Serve LLM, which has an environment of its own."""
