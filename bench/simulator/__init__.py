"""A simulated fleet: real HTTP, real cache engine, real agents, modelled GPUs.

`model`, `gpu_cache`, `request`, `rates` and `estimate` are the model; they do no
I/O and read no clock, so that a discrete-event run can use them too. All their
times are model seconds. `replica` runs the model against the clock.
"""
