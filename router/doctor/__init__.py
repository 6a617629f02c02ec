"""``warmroute doctor``: checks a configuration and its live fleet."""
