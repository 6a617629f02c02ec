"""Redis and Valkey as a remote store, one server or a cluster's endpoint."""
