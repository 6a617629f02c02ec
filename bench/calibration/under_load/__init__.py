"""Two real replicas behind the router, under load, beside two simulated ones.

    python -m bench.calibration.under_load --json out.json

Called by people. Imports the replicas and rates of `bench.calibration`, the simulator, and
what `bench.proof` knows of intervals.
"""
