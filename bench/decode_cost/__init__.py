"""What the engine costs running decodes: vLLM with it, at work, beside vLLM without it.

`replicas` starts two real vLLMs, one with the engine, and two engines without vLLM (`peer`): one to
copy from and to, one that does outside of vLLM's process what the engine inside does. `situations`
says what is compared with what. `decodes` notes when each token of running answers comes,
`pressure` keeps an engine at work, `cores` parts the cores, and `probe`, inside vLLM's own process,
notes each step, and how late its threads get the interpreter's lock, a core, and the engine's lock.
`samples` takes that apart by window, `figures` makes ratios of it. `gil` is a bench of its own.

Called by its command line. Imports the engine, and the stress's measured lock.
"""
