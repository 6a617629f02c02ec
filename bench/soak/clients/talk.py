"""What clients ask: conversations that grow, and prompts that stand alone. Pure."""

import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from simulator.openai_prompts import NUM_WORDS, text_of

_SHARED_PROMPTS: Final = 6
_SHARED_WORDS: Final = 300
_TURN_WORDS: Final = (20, 300)
_MOST_TURNS: Final = 8
_STREAMED_TOKENS: Final = (20, 220)
_WHOLE_TOKENS: Final = (4, 60)
"""Few: a whole answer's first byte comes after all of them, and `FIRST_BYTE_S` bounds that."""
_UNREAD_TOKENS: Final = 1500
_CHAT_SHARE: Final = 0.8
_WHOLE_SHARE: Final = 1 / 3
_NAMED_SHARE: Final = 0.5


class Manner(StrEnum):
    """How a client behaves."""

    PLAIN = "plain"
    LEAVES = "leaves"
    """Closes its connection, before the answer begins or amid it."""
    READS_SLOWLY = "reads slowly"
    NEVER_READS = "never reads"
    """And leaves after a while."""
    SENDS_SLOWLY = "sends slowly"
    HALF_SENT = "half sent"
    """Sends half of its body, and nothing more."""


_MANNERS: Final = {
    Manner.PLAIN: 70,
    Manner.LEAVES: 12,
    Manner.READS_SLOWLY: 7,
    Manner.NEVER_READS: 3,
    Manner.SENDS_SLOWLY: 5,
    Manner.HALF_SENT: 3,
}


def some_text(rng: random.Random, words: int) -> str:
    """Return a text of the simulated model's words."""
    return text_of([rng.randrange(NUM_WORDS) for _ in range(words)])


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as its client sends it."""

    request_id: str
    manner: Manner
    path: str
    body: dict[str, Any]
    session: str | None

    @property
    def streamed(self) -> bool:
        """Whether the answer is to come as events."""
        return bool(self.body["stream"])


@dataclass(kw_only=True)
class Talk:
    """One client's conversations, one after the other."""

    client: int
    seed: int
    _rng: random.Random = field(init=False)
    _number: int = 0
    _sessions: int = 0
    _messages: list[dict[str, str]] = field(default_factory=list)
    _asked: str = ""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"talk {self.seed} {self.client}")
        self._begin()

    def next(self) -> Request:
        """Return the next request; where the last one was not `answered` it is asked anew."""
        self._number += 1
        rng = self._rng
        (manner,) = rng.choices(list(_MANNERS), list(_MANNERS.values()))
        streamed = manner is Manner.NEVER_READS or rng.random() >= _WHOLE_SHARE
        tokens = rng.randint(*(_STREAMED_TOKENS if streamed else _WHOLE_TOKENS))
        body: dict[str, Any] = {
            "model": "sim",
            "max_tokens": _UNREAD_TOKENS if manner is Manner.NEVER_READS else tokens,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < _CHAT_SHARE:
            path = "/v1/chat/completions"
            body["messages"] = [*self._messages, {"role": "user", "content": self._asked}]
        else:
            path = "/v1/completions"
            body["prompt"] = " ".join([*(each["content"] for each in self._messages), self._asked])
        return Request(
            request_id=f"soak-{self.client}-{self._number}",
            manner=manner,
            path=path,
            body=body,
            session=self._session,
        )

    def answered(self, text: str) -> None:
        """Go on with the conversation, or begin another."""
        self._messages += [
            {"role": "user", "content": self._asked},
            {"role": "assistant", "content": text},
        ]
        if len(self._messages) > 2 * _MOST_TURNS:
            self._begin()
        else:
            self._ask()

    def pause_s(self) -> float:
        """Return how long the client thinks before its next request."""
        return self._rng.expovariate(1 / 1.5)

    def chance(self, most: float) -> float:
        """Return a number below ``most``: when a client leaves, and such."""
        return self._rng.uniform(0.0, most)

    def _begin(self) -> None:
        self._sessions += 1
        shared = self._rng.randrange(_SHARED_PROMPTS)
        system = some_text(random.Random(f"shared {self.seed} {shared}"), _SHARED_WORDS)
        self._messages = [{"role": "system", "content": system}]
        is_named = self._rng.random() < _NAMED_SHARE
        self._session = f"client {self.client} session {self._sessions}" if is_named else None
        self._ask()

    def _ask(self) -> None:
        self._asked = some_text(self._rng, self._rng.randint(*_TURN_WORDS))
