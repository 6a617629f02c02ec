"""How fast the model computes prompts, seen from the scheduler's steps. Pure."""

from typing import Final

_LEAST_TOKENS: Final = 64
"""Steps of fewer prompt tokens say more of decoding."""
_NEW_SHARE: Final = 0.2


class ComputeRate:
    """Prompt tokens computed in a second, recent steps counting more."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0
        self._began_s: float | None = None
        self._before_s = 0.0
        self._tokens = 0

    def begin_step(self, prompt_tokens: int, now_s: float) -> None:
        """Note that a step begins, in which so many prompt tokens are computed."""
        if self._began_s is not None:
            took_s = now_s - self._began_s
            # With asynchronous scheduling a step begins while the one before still runs, and
            # its own time may fall into the next interval: the longer of two.
            if self._tokens >= _LEAST_TOKENS and max(took_s, self._before_s) > 0:
                self._learn(self._tokens / max(took_s, self._before_s))
            self._before_s = took_s
        self._began_s = now_s
        self._tokens = prompt_tokens

    def _learn(self, tokens_per_s: float) -> None:
        share = _NEW_SHARE if self._tokens_per_s else 1.0
        self._tokens_per_s += share * (tokens_per_s - self._tokens_per_s)

    def seconds(self, tokens: int) -> float:
        """Return how long so many tokens take; for ever while no prompt was computed."""
        return tokens / self._tokens_per_s if self._tokens_per_s else float("inf")
