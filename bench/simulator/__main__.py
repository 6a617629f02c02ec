"""``python -m bench.simulator``."""

from bench.simulator.cli import simulate

if __name__ == "__main__":
    simulate(prog_name="python -m bench.simulator")
