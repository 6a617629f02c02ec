"""A simulated replica beside a real one: the same requests, hits and times."""
