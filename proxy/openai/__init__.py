"""OpenAI's API: bodies, prompts, answers and usage."""
