"""What one client key allows: models, rates, a budget, an expiry date, a priority class.

`Access` finds the `Grant` of a request's key. Each request begins with `Grant.take_request` and
ends with `Grant.end_request`; its tokens are charged by `router.api.charge.Charge`.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from math import ceil, floor, inf
from typing import Any, Final
from urllib.parse import quote

from router.config.settings import KeyConfig
from router.priority import Priority
from warmroute_common.api_errors import ForbiddenError, RateLimitedError, UnauthorizedError

_MINUTE_S: Final = 60.0
_DAY_S: Final = 86_400.0
_RETRY_PARALLEL_S: Final = 1
"""``Retry-After`` where too many requests run: it is not known when one of them ends."""


class TokenBucket:
    """A rate limit: a bucket that holds one minute's worth, starts full and refills evenly.

    A request may pass while the bucket holds at least one token, and may then take more than
    there is. The next request waits until the debt is paid. So no request is too large to pass,
    and the rate holds over time.
    """

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        # With less than one token nothing would ever pass.
        self._capacity = max(1.0, per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._left = self._capacity
        self._filled_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next request may pass; 0 if it may pass now."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._left) / self._per_s)

    def take(self, count: int, now_s: float) -> None:
        """Take tokens out, also more than there are; a count below 0 puts some back."""
        self._fill(now_s)
        self._left = min(self._capacity, self._left - count)

    def state(self, now_s: float) -> "LimitState":
        """Return how much is left; it is reset when the bucket is full again."""
        self._fill(now_s)
        return LimitState(
            limit=floor(self._capacity),
            remaining=max(0, floor(self._left)),
            reset_s=(self._capacity - self._left) / self._per_s,
        )

    def _fill(self, now_s: float) -> None:
        self._left = min(self._capacity, self._left + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s


class DayBudget:
    """Tokens for each day from 00:00 UTC. Times are seconds since 1970.

    As with a `TokenBucket`, the last request of a day may take more than there is. The next day
    begins without that debt.
    """

    def __init__(self, per_day: float) -> None:
        self.per_day = per_day
        """May be changed: what is used stays used."""
        self._used = 0
        self._day = -1

    def wait_s(self, utc_s: float) -> float:
        """Return the seconds until the next request may pass; 0 if it may pass now."""
        self._renew(utc_s)
        return 0.0 if self._used < self.per_day else self._left_of_day_s(utc_s)

    def take(self, count: int, utc_s: float) -> None:
        """Take tokens out, also more than there are; a count below 0 puts some back."""
        self._renew(utc_s)
        self._used = max(0, self._used + count)

    def state(self, utc_s: float) -> "LimitState":
        """Return how much is left; it is reset at the end of the day."""
        self._renew(utc_s)
        return LimitState(
            limit=floor(self.per_day),
            remaining=max(0, floor(self.per_day - self._used)),
            reset_s=self._left_of_day_s(utc_s),
        )

    def _renew(self, utc_s: float) -> None:
        if (day := int(utc_s // _DAY_S)) != self._day:
            self._day, self._used = day, 0

    @staticmethod
    def _left_of_day_s(utc_s: float) -> float:
        return _DAY_S - utc_s % _DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """How much of a limit is left now, as clients see it."""

    limit: int
    remaining: int
    reset_s: float
    """Until the whole limit is available again."""

    def openai_headers(self, unit: str) -> dict[str, str]:
        """Return OpenAI's headers of a limit of ``requests`` or ``tokens``."""
        return {
            f"x-ratelimit-limit-{unit}": str(self.limit),
            f"x-ratelimit-remaining-{unit}": str(self.remaining),
            f"x-ratelimit-reset-{unit}": duration(self.reset_s),
        }

    def anthropic_headers(self, unit: str, utc_s: float) -> dict[str, str]:
        """Return Anthropic's; ``utc_s`` is the time since 1970, in which they give the reset."""
        reset = datetime.fromtimestamp(ceil(utc_s + self.reset_s), UTC).isoformat()
        return {
            f"anthropic-ratelimit-{unit}-limit": str(self.limit),
            f"anthropic-ratelimit-{unit}-remaining": str(self.remaining),
            f"anthropic-ratelimit-{unit}-reset": reset.replace("+00:00", "Z"),
        }

    def shown(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "limit": self.limit,
            "remaining": self.remaining,
            "reset_s": round(self.reset_s, 3),
        }


def duration(seconds: float) -> str:
    """Return a time as OpenAI's headers have it: ``20ms``, ``1.5s``, ``6m0s``, ``13h0m5s``."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


class Grant:
    """What one client key allows. ``refused`` counts refusals by key name and cause.

    Times named ``now_s`` are of a monotonic clock. The key's day and expiry date count by
    ``utc_clock``, in seconds since 1970.
    """

    def __init__(
        self,
        key: KeyConfig,
        refused: Counter[tuple[str, str]],
        *,
        owns_cache: bool = False,
        routers: int = 1,
        utc_clock: Callable[[], float] = time.time,
    ) -> None:
        """``owns_cache``: the key shares no cached KV with others. ``routers``: see `change`."""
        self._refused = refused
        self._utc_clock = utc_clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._budget: DayBudget | None = None
        self._running = 0
        """Requests that have begun and not ended."""
        self.change(key, owns_cache=owns_cache, routers=routers)

    def change(self, key: KeyConfig, *, owns_cache: bool = False, routers: int = 1) -> None:
        """Apply a key's new settings. What is used of an unchanged rate, and of the day's budget,
        stays used.

        ``routers``: how many routers share the clients. Each enforces this part of the limits.
        """
        self.name = key.name
        self.salt_key = key.sha256.encode() if owns_cache else None
        """The secret of which `Policy.parse` makes salts; None: clients' own salts count."""
        self.priority = Priority.named(key.priority)
        """The best class of the key's requests."""
        self._scope = quote(key.name, safe="")
        self._models = None if key.models is None else frozenset(key.models)
        self._requests = _bucket(self._requests, key.requests_per_minute, routers)
        self._tokens = _bucket(self._tokens, key.tokens_per_minute, routers)
        if key.tokens_per_day is None:
            self._budget = None
        else:
            self._budget = self._budget or DayBudget(0)
            self._budget.per_day = key.tokens_per_day / routers
        parallel = key.max_parallel_requests
        self._max_running = None if parallel is None else max(1, floor(parallel / routers))
        self._valid_until = key.valid_until
        self._expires_utc_s = inf if key.valid_until is None else _end_of_day(key.valid_until)

    def own_session(self, session: str | None) -> str | None:
        """Return a session's name among those of all keys: ``KEY/SESSION``."""
        return None if session is None else f"{self._scope}/{session}"

    def allows(self, model: str | None) -> bool:
        """Whether the key may use a model; None leaves the choice to the replica."""
        return self._models is None or model in self._models

    def check_model(self, model: str | None) -> None:
        """Raise `ForbiddenError` for a model that the key may not use."""
        if self.allows(model):
            return
        self._refused[self.name, "model"] += 1
        found = (
            f"the key '{self.name}' is limited to certain models, and the request names none"
            if model is None
            else f"the key '{self.name}' may not use the model '{model}'"
        )
        raise ForbiddenError(
            f"{found}; GET /v1/models lists its models", param="model", code="model_not_allowed"
        )

    # --- limits

    def check_expiry(self) -> None:
        """Raise `UnauthorizedError` for a key that has expired."""
        if self._expires_utc_s == inf or self._utc_clock() < self._expires_utc_s:
            return
        self._refused[self.name, "expired"] += 1
        raise UnauthorizedError(
            f"the key '{self.name}' has expired: its last day was {self._valid_until} (UTC); ask "
            "the operator of this router for a new one",
            code="expired_api_key",
        )

    def take_request(self, now_s: float) -> None:
        """Count a request; after that the caller must call `end_request` once.

        Raises `UnauthorizedError` for a key that has expired, and `RateLimitedError` where a limit
        is used up.
        """
        self.check_expiry()
        if self._max_running is not None and self._running >= self._max_running:
            raise self._used_up(
                "parallel",
                f"the key '{self.name}' has {self._running} requests under way, and may have "
                f"{self._max_running} at once (max_parallel_requests); send this one again when "
                "another one has ended",
                _RETRY_PARALLEL_S,
            )
        if self._requests is not None and (wait_s := self._requests.wait_s(now_s)) > 0:
            raise self._rate_used_up("requests", wait_s)
        self._check_tokens(now_s)
        if self._requests is not None:
            self._requests.take(1, now_s)
        self._running += 1

    def end_request(self) -> None:
        """Note that a request that `take_request` let pass has ended, however it did."""
        self._running -= 1

    def take_prompt(self, tokens: int, now_s: float) -> None:
        """Count a prompt; raise `RateLimitedError` where tokens are used up.

        It checks again because requests that arrive together all pass `take_request` before the
        first of them is read.
        """
        self._check_tokens(now_s)
        self._take_tokens(tokens, now_s)

    def take_answer(self, tokens: int, now_s: float) -> None:
        """Count an answer's tokens; below 0 where the prompt had fewer than were counted."""
        self._take_tokens(tokens, now_s)

    @property
    def limits_tokens(self) -> bool:
        """Whether the key has a limit of tokens."""
        return self._tokens is not None or self._budget is not None

    def limit_headers(self, now_s: float, *, anthropic: bool = False) -> dict[str, str]:
        """Return the headers of the limits, as OpenAI or as Anthropic names them.

        They show the limit of tokens with less left, if there are two.
        """
        utc_s = self._utc_clock()
        states: dict[str, LimitState] = {}
        if self._requests is not None:
            states["requests"] = self._requests.state(now_s)
        tokens = [] if self._tokens is None else [self._tokens.state(now_s)]
        if self._budget is not None:
            tokens.append(self._budget.state(utc_s))
        if tokens:
            states["tokens"] = min(tokens, key=lambda each: each.remaining)
        headers: dict[str, str] = {}
        for unit, state in states.items():
            own = state.anthropic_headers(unit, utc_s) if anthropic else state.openai_headers(unit)
            headers |= own
        return headers

    def shown(self, now_s: float) -> dict[str, Any]:
        """Return the key's limits, and what is left of them, for JSON."""
        limits: dict[str, Any] = {}
        if self._requests is not None:
            limits["requests_per_minute"] = self._requests.state(now_s).shown()
        if self._tokens is not None:
            limits["tokens_per_minute"] = self._tokens.state(now_s).shown()
        if self._budget is not None:
            limits["tokens_per_day"] = self._budget.state(self._utc_clock()).shown()
        return {
            "key": self.name,
            "priority": self.priority.name.lower(),
            "valid_until": self._valid_until,
            "running_requests": self._running,
            "max_parallel_requests": self._max_running,
            **limits,
        }

    def _check_tokens(self, now_s: float) -> None:
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now_s)) > 0:
            raise self._rate_used_up("tokens", wait_s)
        if self._budget is not None and (wait_s := self._budget.wait_s(self._utc_clock())) > 0:
            raise self._used_up(
                "budget",
                f"the key '{self.name}' has used up its {floor(self._budget.per_day)} tokens per "
                "day; the next day begins at 00:00 UTC",
                ceil(wait_s),
                code="insufficient_quota",
            )

    def _take_tokens(self, count: int, now_s: float) -> None:
        if self._tokens is not None:
            self._tokens.take(count, now_s)
        if self._budget is not None:
            self._budget.take(count, self._utc_clock())

    def _rate_used_up(self, unit: str, wait_s: float) -> RateLimitedError:
        retry_after_s = ceil(round(wait_s, 6))
        return self._used_up(
            unit,
            f"the key '{self.name}' has used up its {unit} per minute; send the request again in "
            f"{duration(retry_after_s)}",
            retry_after_s,
        )

    def _used_up(
        self, cause: str, message: str, retry_after_s: int, *, code: str | None = None
    ) -> RateLimitedError:
        self._refused[self.name, cause] += 1
        return RateLimitedError(
            message, cause=f"key-{cause}", retry_after_s=retry_after_s, code=code
        )


def _bucket(before: TokenBucket | None, per_minute: int | None, routers: int) -> TokenBucket | None:
    """Return the bucket of a rate: that from before if the rate is the same."""
    if per_minute is None:
        return None
    share = per_minute / routers
    return before if before is not None and before.per_minute == share else TokenBucket(share)


def _end_of_day(day: str) -> float:
    """Return when a day (ISO 8601, UTC) ends, in seconds since 1970."""
    after = date.fromisoformat(day) + timedelta(days=1)
    return datetime(after.year, after.month, after.day, tzinfo=UTC).timestamp()
