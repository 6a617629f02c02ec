"""Remote servers, each behind the same few calls."""
