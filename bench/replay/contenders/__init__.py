"""The routers that a replay compares: ours, the peers, and the bound that knows the truth."""
