"""The page at ``/ui``."""
