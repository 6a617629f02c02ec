"""What replicas report: KV events, the events of agents, and health probes."""
