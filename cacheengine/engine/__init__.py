"""The cache engine: slots of a pool, the tiers below it, and the threads that move chunks."""
