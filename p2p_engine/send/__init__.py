"""The sending side of an engine: shipments, their chunks, and sources that are held to be
pulled."""
