"""The local disk tier: one file a chunk, direct I/O, several directories."""
