"""Real replicas: the demo, times to first token by tier, prefetch, the small model."""
