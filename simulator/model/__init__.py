"""One replica's scheduler, cache and speeds. Pure: no clock, no I/O."""
