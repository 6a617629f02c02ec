"""The cache engine against the limits of the machine."""
