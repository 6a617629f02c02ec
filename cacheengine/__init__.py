"""The KV cache engine of a replica: a pool of CPU RAM, and below it local disk and a remote store.

`connector` is its side in vLLM, `agent` its HTTP API, `engine` its core, `residency` its decisions.
"""
