"""Cache engines side by side: ours, vLLM's own tiering, LMCache."""
