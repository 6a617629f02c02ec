"""Settings of the circuit breakers."""

from dataclasses import dataclass

from router.config.schema import setting


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """Leaving a replica alone whose requests fail, though its health checks do well.

    Failures are no first byte in time, a connection that breaks, and the statuses 500, 502, 503
    and 504. Once it opens, requests go to other replicas while one of those can answer.
    """

    enabled: bool = True
    """Whether it ever opens."""
    failures_in_a_row: int = setting(5, at_least=1)
    """After so many it opens."""
    failure_share: float = setting(0.5, above=0, at_most=1)
    """It opens too when so large a share of the requests within ``window_s`` has failed, of ten
    at least."""
    window_s: float = setting(10.0, above=0)
    """How far back the share looks."""
    open_s: float = setting(5.0, above=0)
    """Then one request at a time goes through. It is closed when one succeeds; each one that
    fails opens it for twice as long."""
    max_open_s: float = setting(60.0, above=0)
    """The longest that it is open until the next one is tried."""
