"""The face that vLLM sees; the only place that imports vLLM."""
