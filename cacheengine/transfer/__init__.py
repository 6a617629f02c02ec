"""Copies of chunks from one replica to another over TCP."""
