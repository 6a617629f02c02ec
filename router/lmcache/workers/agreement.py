"""Whether the keys that LMCache's workers tell are those that the router makes of prompts. Pure.

With another seed, hash or chunk size all its chunks would match nothing, and nothing would say so.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from router.fleet import Replica
from router.index import PromptKeyCache

log = logging.getLogger("warmroute.lmcache")

_MAX_PROMPTS: Final = 10_000
_LEAST_PROMPTS: Final = 20
_STRANGE_CHUNKS: Final = 200
"""So many that begin no prompt which was asked for speak for other keys."""


class Agreement:
    """Compares chunks that were stored with the first chunks of prompts, the latest of them."""

    def __init__(self) -> None:
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._strange: dict[str, int] = {}
        """By replica how many chunks were told of; -1 once one of them was a prompt's."""

    def asked(self, replicas: Iterable[Replica], keyring: PromptKeyCache) -> None:
        """Note a prompt that will be sent to some replica."""
        for each in replicas:
            chunks = keyring.of(each.key_shape, each.adapters).chunk_keys
            if chunks:
                self._asked[chunks[0]] = None
        while len(self._asked) > _MAX_PROMPTS:
            self._asked.popitem(last=False)

    def tied(self, replica: str) -> None:
        """Begin anew with a replica."""
        self._strange.pop(replica, None)

    def stored(self, replica: str, chunks: Sequence[int]) -> None:
        """Compare what a replica has stored; log where it cannot be of prompts that were sent."""
        before = self._strange.get(replica, 0)
        if before < 0:
            return
        if any(each in self._asked for each in chunks):
            self._strange[replica] = -1
            return
        if len(self._asked) < _LEAST_PROMPTS:
            return
        after = self._strange[replica] = before + len(chunks)
        if before < _STRANGE_CHUNKS <= after:
            log.warning(
                "none of the chunks that LMCache inside %s has stored is a prompt's that was sent: "
                "is its chunk_size, pre_caching_hash_algorithm or PYTHONHASHSEED another than "
                "lmcache_workers and hash_seed say, or do all its prompts come past this router?",
                replica,
            )

    def state(self, replica: str | None) -> str:
        """Return "seen", "unknown" or "differ", as it stands with a replica's keys."""
        count = 0 if replica is None else self._strange.get(replica, 0)
        return "seen" if count < 0 else "differ" if count >= _STRANGE_CHUNKS else "unknown"
