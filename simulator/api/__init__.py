"""The OpenAI server of a simulated replica: what it reads, answers and publishes."""
