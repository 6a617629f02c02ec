"""Starting vLLM with the cache engine inside: ``warmroute replica``."""
