"""What a client's key allows, and what of it has been used."""

from collections import Counter
from math import ceil
from typing import Final

from router.access.budget import Budget
from router.config import KeyConfig
from warmroute_common.api_errors import ForbiddenError, RateLimitedError

_STREAMED_BYTES_PER_TOKEN: Final = 256
"""About the size of a token's event in a stream, for a stream that tells no ``usage``."""


class Grant:
    """One key's; ``refused`` counts what it was refused for."""

    def __init__(self, key: KeyConfig, refused: Counter[tuple[str, str]]) -> None:
        self._refused = refused
        self._budgets: dict[str, Budget] = {}
        self.change(key)

    def change(self, key: KeyConfig) -> None:
        """Allow what a key allows from now on; what was used of a rate that stays stays used."""
        self.name = key.name
        self._models = None if key.models is None else frozenset(key.models)
        before = self._budgets
        self._budgets = {}
        for unit, per_minute in (
            ("requests", key.requests_per_minute),
            ("tokens", key.tokens_per_minute),
        ):
            if per_minute is not None:
                budget = before.get(unit)
                same = budget is not None and budget.per_minute == per_minute
                self._budgets[unit] = budget if budget and same else Budget(per_minute)

    def allows(self, model: str | None) -> bool:
        """Whether the key may ask a model; None is the replica's choice."""
        return self._models is None or model in self._models

    def check_model(self, model: str | None) -> None:
        """Raise `ForbiddenError` for a model that the key may not ask."""
        if self.allows(model):
            return
        self._refused[self.name, "model"] += 1
        what = "ask for a model by its name" if model is None else f"not the model '{model}'"
        raise ForbiddenError(
            f"the key '{self.name}' may use certain models only, {what}; GET /v1/models lists them",
            param="model",
            code="model_not_allowed",
        )

    def take_request(self, now_s: float) -> None:
        """Note a request; raise `RateLimitedError` where it is one too many, or tokens have run out."""
        self._check("requests", now_s)
        self._check("tokens", now_s)
        self._take("requests", 1, now_s)

    def take_prompt(self, tokens: int, now_s: float) -> None:
        """Note a prompt; raise `RateLimitedError` where tokens have run out.

        That is asked once more: requests that came together have all passed `take_request`
        before the first of them was read.
        """
        self._check("tokens", now_s)
        self._take("tokens", tokens, now_s)

    def take_answer(self, tokens: int | None, streamed_bytes: int, now_s: float) -> None:
        """Note an answer's tokens; where it told none, about as many as its stream had."""
        guess = streamed_bytes // _STREAMED_BYTES_PER_TOKEN
        self._take("tokens", guess if tokens is None else tokens, now_s)

    def _take(self, unit: str, count: int, now_s: float) -> None:
        if unit in self._budgets:
            self._budgets[unit].take(count, now_s)

    def _check(self, unit: str, now_s: float) -> None:
        budget = self._budgets.get(unit)
        if budget is None or (wait_s := budget.wait_s(now_s)) <= 0:
            return
        self._refused[self.name, unit] += 1
        raise RateLimitedError(
            f"the key '{self.name}' has used up its {unit} per minute",
            cause=f"key-{unit}",
            retry_after_s=ceil(wait_s),
        )
