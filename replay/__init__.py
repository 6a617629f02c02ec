"""Recorded requests, played in simulated time: what another fleet would have done."""
