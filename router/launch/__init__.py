"""Starting a router with its replicas on one machine, and stopping them together."""
