"""KV to where it will be needed, before a request is forwarded."""
