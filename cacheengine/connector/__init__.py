"""What vLLM loads; the only package that imports vLLM."""
