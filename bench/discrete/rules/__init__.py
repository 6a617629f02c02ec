"""Other routers' published rules, as pure decisions: baselines for a fleet in discrete events.

`bench.discrete` calls them; they import nothing but each other, `router.index.prompt_keys.KvTier`
and the standard library.
"""
