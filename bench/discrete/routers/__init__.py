"""The routers of a fleet in model time: ours, those that decide by a rule, and the oracle."""
