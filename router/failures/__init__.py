"""What follows from failed requests: a breaker for each replica, and a budget of retries.

A `Breaker` watches what becomes of a replica's requests, and says when it should be left alone.
A `RetryBudget` bounds how many requests are sent again at once, to a fleet that may be failing.

Pure: times, thresholds and randomness are passed in. Called by fleet, proxy and, for the states,
by record and the application. Imports config.
"""

from router.failures.breaker import TRANSITIONS, Breaker, Circuit, Sign
from router.failures.retries import RetryBudget, pause_s

__all__ = ["TRANSITIONS", "Breaker", "Circuit", "RetryBudget", "Sign", "pause_s"]
