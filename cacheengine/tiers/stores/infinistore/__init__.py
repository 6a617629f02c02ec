"""InfiniStore as a remote store; its client runs in a process of its own."""
