"""``python -m cacheengine.simulator``."""

from cacheengine.simulator.cli import simulate

if __name__ == "__main__":
    simulate(prog_name="python -m cacheengine.simulator")
