"""The endpoints that the router answers itself: models, health, metrics, explain, replicas."""
