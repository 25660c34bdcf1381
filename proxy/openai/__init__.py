"""What OpenAI's API says: bodies, prompts, answers, usage."""
