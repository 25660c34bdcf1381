"""What arrives: from OFFER until the bytes are where they belong."""
