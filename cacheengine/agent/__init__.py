"""The agent: the HTTP server inside each replica through which routers and peers use its engine."""
