"""Which replica holds which blocks of KV in which tier."""
