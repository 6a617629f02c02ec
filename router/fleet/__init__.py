"""The state of the fleet: replicas, what each holds, its load, rates and sessions. Pure."""
