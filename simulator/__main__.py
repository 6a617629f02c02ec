"""``python -m simulator``."""

from simulator.cli import simulate

if __name__ == "__main__":
    simulate(prog_name="python -m simulator")
