"""The router: sends every prompt to the replica that already remembers it."""
