"""What leaves this engine: shipments, their chunks, and what is held to be pulled."""
