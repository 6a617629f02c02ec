"""LMCache for routing: the router is the coordinator of stock LMCache servers, and the controller
of LMCache inside vLLM and of our own engine's agents."""
