"""Which replicas the fleet has and which settings apply, while both change."""
