"""The clients of a soak: what they ask (`talk`), how they behave, what must come (`answers`)."""
