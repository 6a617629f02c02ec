"""The KV cache engine of a replica: pinned CPU RAM, local disk, remote, prefetch and move.

A chunk stored: vLLM's scheduler asks `connector.manager` to store blocks; `engine` reserves
slots by `residency`; `connector.copying` copies them from the GPU into the `memory` pool;
when all has come, `record` notes the keys for routers and `residency.cascade` queues the
chunk for the tiers below, where `engine.tier_io` writes it.

A chunk promoted: the scheduler looks a key up, or a router asks the `agent` to prefetch it;
`residency.walks` finds it in a tier below and takes a slot; `engine.tier_io` reads it
there, and wakes the request that waits for it.

A chunk loaded: it is held while `connector.copying` copies it to the GPU, and not evicted.

A chunk moved or copied: a router or controller asks the `agent` of one replica, whose
`transfer` fetches it from the other's.

`simulator` is a fleet with all of this but a GPU.

Directions: launch -> settings; simulator, connector -> agent -> transfer -> engine -> settings,
residency -> tiers, memory, identity, record -> keys, wire, trust, values, address, bulk.
"""
