"""The tiers below the CPU pool, behind the contract of ``tiers.base``."""
