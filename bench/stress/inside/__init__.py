"""What runs in an engine's process of the stress: the engine, and a scheduler that calls it.

`process` starts engine, agent and transfer server; `scheduler` makes the calls that vLLM's
connector makes, and compares each byte with `content`; `lock` measures the engine's lock.
"""
