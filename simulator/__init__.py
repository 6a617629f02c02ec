"""A simulated fleet: real HTTP servers, cache engines and agents over modelled GPUs."""
