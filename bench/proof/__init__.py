"""The proof: which cases are published, how each is run, told and kept.

``python -m bench.proof`` makes every result from a clean commit, rewrites the README's
tables from them and says which bars are met. Pure: `cases`, `figures`, `statistics`,
`goodput`, `records`. `run` plays a case on all cores, `tree` knows what was run,
`store` keeps it, `wired` is the one module that knows the driver and the workloads,
`bench.proof.report` reads what is kept.
"""
