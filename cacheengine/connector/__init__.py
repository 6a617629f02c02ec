"""The face that vLLM sees; the only room that imports vLLM.

`spec` is named to vLLM and makes the rest: `manager` is the scheduler's view of the engine,
`copy_worker` and `copy_runs` move KV between the GPU and the pool's slots.

Loaded by vLLM. Imports engine, residency, agent, transfer, settings, memory, record, identity,
launch and tiers.
"""
