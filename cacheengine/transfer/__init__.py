"""Chunks from one replica's pool into another's, as they are, over TCP."""
