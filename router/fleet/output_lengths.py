"""How many tokens an answer is expected to have, from earlier answers (`OutputLengths`). Pure."""

from typing import Final

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights

_KEPT: Final = 0.7
"""Weight of an answer after the next one of the same session or key: about the last 3 count."""


class OutputLengths:
    """Mean output tokens of the last answers, by session, by client's key, and of all.

    Bounded: of too many sessions or keys the one that was answered least recently is forgotten.
    """

    def __init__(self, max_sessions: int, weights: CostWeights = DEFAULT_WEIGHTS) -> None:
        self._max_entries = max_sessions
        self._of_all = weights.output_tokens
        self._by_session: dict[str, float] = {}
        self._by_key: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._by_session) + len(self._by_key)

    def expected(self, session: str | None, key: str | None, max_tokens: int = 0) -> float:
        """Return the expected number of output tokens; at most ``max_tokens``, unless that is 0.

        The session's mean if it was answered before, else its key's, else that of all answers.
        """
        expected = self._by_session.get(session or "") or self._by_key.get(key or "")
        expected = expected or self._of_all
        return min(expected, max_tokens) if max_tokens else expected

    def note(self, session: str | None, key: str | None, output_tokens: int) -> None:
        """Note how many tokens an answer had; one without tokens says nothing."""
        if output_tokens <= 0:
            return
        self._of_all += (1.0 - _KEPT) * (output_tokens - self._of_all)
        for name, table in ((session, self._by_session), (key, self._by_key)):
            if name is None:
                continue
            before = table.pop(name, float(output_tokens))  # put in again, it is the last in order
            table[name] = before + (1.0 - _KEPT) * (output_tokens - before)
            if len(table) > self._max_entries:
                del table[next(iter(table))]

    def __repr__(self) -> str:
        return f"<OutputLengths {len(self)} of_all={self._of_all:.0f}>"
