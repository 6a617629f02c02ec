"""How long the engine's lock is held: `rig` has what is done, `__main__` times it."""
