"""The receiving side of an engine: from OFFER until the bytes are in the sink."""
