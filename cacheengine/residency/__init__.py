"""Which chunk is in which tier, which may be used, and what moves next. Pure: no I/O, no clock."""
