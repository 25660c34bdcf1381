"""Other engines: links that this one dialled, sessions that it accepted, and the directory of
ranks."""
