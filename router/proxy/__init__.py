"""One request from its acceptance to the last byte of its answer; `Proxy.handle` is the start."""
