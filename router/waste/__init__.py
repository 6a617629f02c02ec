"""Why tokens were computed and not taken from a cache, and what that costs."""
