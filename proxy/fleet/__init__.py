"""Which instances there are, and what each is doing."""
