"""The configuration of one replica's engine, with LMCache's own keys."""
