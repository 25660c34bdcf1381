"""The wheel in clean environments, without a compiler: `make wheels` ends with it."""
