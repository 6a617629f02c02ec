"""The KV cache engine of a replica: pinned CPU RAM, local disk, prefetch."""
