"""The identity of KV: which layout, weights and adapters a chunk belongs to."""
