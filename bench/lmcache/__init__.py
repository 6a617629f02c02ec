"""Stock vLLM replicas with stock LMCache servers, for tests and the demo of the real thing."""
