"""What the engine costs running decodes: vLLM with it, at work, beside vLLM without it.

`replicas` starts two real vLLMs, one with the engine, and `peer` an engine to copy from and to.
`decodes` notes when each token of running answers comes, `pressure` keeps the engine at work, and
`probe`, inside vLLM's own process, how late its threads get the interpreter's lock, a core, and
the engine's lock. `figures` makes ratios of it.

Called by its command line. Imports the engine, and the stress's measured lock.
"""
