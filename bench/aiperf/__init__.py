"""A client that nobody here wrote, NVIDIA's AIPerf, in front of the router and beside it."""
