"""The face that vLLM sees; the only room that imports vLLM.

`connector` is named to vLLM and tells what vLLM's offloading does not (`served`): the model's
identity, requests' adapters, and weights that change. `spec` makes the rest:
`manager` is the scheduler's view of the engine (`stores`: what it stores), `copying` moves KV
between the GPU and the pool's slots.

Loaded by vLLM. Imports engine, residency, agent, transfer, settings, memory, record, identity,
launch and tiers.
"""
