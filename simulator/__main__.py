"""``python -m simulator``."""

from simulator.simulate_command import simulate

if __name__ == "__main__":
    simulate(prog_name="python -m simulator")
