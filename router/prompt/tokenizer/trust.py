"""How far a reader's tokens are those of the replicas, and how a replica is asked about it."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import aiohttp

_log = logging.getLogger(__name__)


class Trust(StrEnum):
    """How far the tokens of a reader are those of the replicas."""

    EXACT = "exact"
    """A replica gave equal tokens for all probes, or the files are of a kind that is tested to."""
    DOUBTFUL = "doubtful"
    """Probably equal: used, and not called exact."""
    REFUTED = "refuted"
    """Every replica that was asked gave other tokens: not used."""


class Agreement:
    """Which replicas gave a reader's tokens for one kind of prompt: text or chat."""

    def __init__(self, by_files: Trust) -> None:
        """``by_files`` is what counts as long as no replica was asked; REFUTED stays."""
        self._by_files = by_files
        self._equal: dict[str, bool] = {}

    @property
    def trust(self) -> Trust:
        """How far the tokens equal the replicas', except for replicas that differ (`differs`)."""
        if self._by_files is Trust.REFUTED or not self._equal:
            return self._by_files
        return Trust.EXACT if any(self._equal.values()) else Trust.REFUTED

    def note(self, replica_url: str, equal: bool | None) -> None:
        """Note what came of a comparison (None: there was nothing to compare)."""
        if equal is not None:
            self._equal[replica_url] = equal

    def forget(self, replica_url: str) -> None:
        """Forget a replica: it serves something else now."""
        self._equal.pop(replica_url, None)

    def differs(self, replica_url: str) -> bool:
        """Whether this replica gave other tokens than the ones that are used."""
        return self.trust is not Trust.REFUTED and self._equal.get(replica_url) is False


async def compare(
    session: aiohttp.ClientSession,
    replica_url: str,
    probes: Sequence[Mapping[str, Any]],
    ours: Callable[[Mapping[str, Any]], list[int] | None],
    headers: Mapping[str, str] | None,
) -> tuple[bool | None, int | None]:
    """Compare ``ours(probe)`` with the replica's ``POST /tokenize`` of each probe.

    Returns whether all are equal, None where nothing could be compared, and the tokens of the
    replica's context, if it told them. Probes that we have no tokens for, or that the replica
    refuses (a template need not take every role), are left out. Raises what aiohttp raises,
    and ValueError or KeyError when the answer is not one of /tokenize.
    """
    url = f"{replica_url.rstrip('/')}/tokenize"
    # The router's session adds none by itself, and without it vLLM answers 400.
    typed = {**(headers or {}), "Content-Type": "application/json"}
    equal: bool | None = None
    max_model_len: int | None = None
    for probe in probes:
        expected = ours(probe)
        if expected is None:
            continue
        async with session.post(url, json=probe, headers=typed) as response:
            if response.status in (400, 422):
                continue
            response.raise_for_status()
            answer = await response.json()
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        max_model_len = answer.get("max_model_len")
        equal = answer["tokens"] == expected
        if not equal:
            _report(url, probe, expected, answer["tokens"])
            break
    return equal, max_model_len


def _report(url: str, probe: Mapping[str, Any], ours: list[int], theirs: list[int]) -> None:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (mine, yours) in pairs if mine != yours), min(len(ours), len(theirs)))
    _log.error(
        "%s: tokens differ from ours at %d of %d for %.200s; prompts of this kind are matched "
        "by text there until they agree. Check tokenizer.path, and tokenizer.chat_template if "
        "the replica runs with --chat-template",
        url,
        at,
        len(theirs),
        json.dumps(probe, ensure_ascii=False),
    )
