"""What vLLM serves: its model, its requests and their keys, and weights that change meanwhile."""
