"""Copies of KV between vLLM's pages and the pool's rows, on CPUs and on GPUs."""
