"""Chunks that a request offered and that found no room, until they are offered again. Pure.

vLLM offers each chunk of a request once: what a partial reservation leaves out
it passes over. `connector` sets it back to the first of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vllm.v1.kv_offload.base import OffloadKey

_LONGEST_PAUSE: Final = 16
"""Offers passed over at most: one comes with each step, and asking the engine costs time."""


@dataclass(slots=True)
class _Pause:
    offers: int = 0
    left: int = 0


class RefusedOffers:
    """For each request the first chunk that was refused, and when it is taken up again.

    While nothing of a request is taken, twice as many of its offers are passed
    over each time.
    """

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}
        self._news: dict[str, OffloadKey] = {}

    def pass_over(self, req_id: str, first: OffloadKey) -> bool:
        """Whether an offer that begins with this chunk is too early; it is then refused."""
        pause = self._pauses.get(req_id)
        if pause is None or not pause.left:
            return False
        pause.left -= 1
        self._news[req_id] = first
        return True

    def refuse(self, req_id: str, first: OffloadKey, *, took_some: bool) -> None:
        """Note that of an offer the chunks from this one on found no room."""
        pause = self._pauses.setdefault(req_id, _Pause())
        pause.offers = 0 if took_some else min(2 * pause.offers + 1, _LONGEST_PAUSE)
        pause.left = pause.offers
        self._news[req_id] = first

    def end(self, req_id: str) -> None:
        """Note that all that was offered is taken or there, or that the request has ended."""
        self._pauses.pop(req_id, None)
        self._news.pop(req_id, None)

    def hurry(self, req_ids: Iterable[str]) -> None:
        """Let the next offers of these requests count: they are the last."""
        for req_id in req_ids:
            self._pauses.pop(req_id, None)

    def take_news(self) -> dict[str, OffloadKey]:
        """Return, by request, the first chunk refused since the last call."""
        news, self._news = self._news, {}
        return news

    def clear(self) -> None:
        """Forget all requests."""
        self._pauses.clear()
        self._news.clear()
