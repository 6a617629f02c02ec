"""What follows from failed requests: a breaker for each replica, and a budget of retries.

A `Breaker` watches what becomes of a replica's requests, and says when it should be left alone.

Pure: times, thresholds and randomness are passed in. Called by fleet, proxy and, for the states,
by record and the application. Imports config.
"""

from router.failures.breaker import TRANSITIONS, Breaker, Circuit, Sign

__all__ = ["TRANSITIONS", "Breaker", "Circuit", "Sign"]
