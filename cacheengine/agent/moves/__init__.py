"""Moving and copying chunks between replicas, as controller and routers ask for it."""
