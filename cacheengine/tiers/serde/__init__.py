"""How a chunk's bytes are written for the remote tier."""
