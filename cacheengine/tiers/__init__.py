"""The tiers below the CPU pool: `disk`, and `remote` on a server (`store`)."""
