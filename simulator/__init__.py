"""A simulated fleet: real HTTP, real cache engine, real agents, modelled GPUs.

`cli` is ``warmroute simulate``: `fleet` starts the replicas, `api` is their OpenAI server with
its KV events, `storage` their engine and agent, `model` the GPU. The model does no I/O and reads
no clock, so that a discrete-event run can use it too; all its times are model seconds.
`replica` runs it against the clock.

Called by the command line and by the benchmarks. Imports agent, transfer, engine, settings,
residency, tiers, memory, identity and record.
"""
