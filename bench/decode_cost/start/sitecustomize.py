"""Python imports this at each start of a process whose PYTHONPATH has this directory."""

from bench.decode_cost.probe import begin

begin()
