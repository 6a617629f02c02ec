"""What replicas tell of themselves: what they hold, whether they live, which models they serve."""
