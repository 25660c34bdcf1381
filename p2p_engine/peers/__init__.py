"""Other engines: links that this one dialled, sessions that it accepted, and where ranks listen."""
