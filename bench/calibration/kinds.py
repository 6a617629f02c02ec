"""The kinds of requests that a real and a simulated replica are compared by.

Each function asks a replica the prompts of one seed and returns the answers by
the name of their row: the same seed is the same prompts on every replica.
"""

import random
from collections.abc import Callable, Mapping
from typing import Final

from bench.calibration.replica import TOKENS
from bench.calibration.target import Asked, Prompt, Target

Rows = Mapping[str, Asked]

SHORT_TOKENS: Final = 700
LONG_TOKENS: Final = 3_000
PREFIX_TOKENS: Final = 6_100
"""Neither whole blocks nor whole chunks: how much of it is found must be the same too."""
TAIL_TOKENS: Final = 150
DECODES: Final = 4
_DECODED_PROMPT_TOKENS: Final = 100

GPU: Final = "hit in the GPU tier"
CPU: Final = "hit in CPU RAM"
DISK: Final = "hit on disk"


class Prompts:
    """Prompts of random tokens, the same ones in the same order for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self, tokens: int) -> list[int]:
        """Return a prompt that no other shares a beginning with."""
        return self._random.choices(TOKENS, k=tokens)


def short(target: Target, prompts: Prompts) -> Rows:
    """Ask a short prompt that nobody has seen."""
    return {"cold, short": target.ask(prompts.next(SHORT_TOKENS))}


def tiers(target: Target, prompts: Prompts, prefix_tokens: int = PREFIX_TOKENS) -> Rows:
    """Ask about one long prefix while it lies in one tier after the other."""
    prefix = prompts.next(prefix_tokens)
    rows = {"cold, long": target.ask(prefix)}
    target.tiers.wait_stored(prefix, "cpu")

    rows[GPU] = target.ask(_longer(prefix, prompts))

    target.tiers.empty_gpu()
    rows[CPU] = target.ask(_longer(prefix, prompts))

    target.tiers.empty_gpu()
    target.tiers.leave_on_disk(prefix)
    rows[DISK] = target.ask(_longer(prefix, prompts))
    return rows


def _longer(prefix: Prompt, prompts: Prompts) -> list[int]:
    return [*prefix, *prompts.next(TAIL_TOKENS)]


def queued(target: Target, prompts: Prompts) -> Rows:
    """Ask two cold prompts at once, each longer than a step computes."""
    first, second = target.ask_at_once([prompts.next(LONG_TOKENS) for _ in range(2)])
    return {"two at once, first": first, "two at once, second": second}


def beside_decodes(target: Target, prompts: Prompts) -> Rows:
    """Ask a cold prompt while the replica decodes for others."""
    others = [prompts.next(_DECODED_PROMPT_TOKENS) for _ in range(DECODES)]
    with target.decoding(others):
        return {f"cold beside {DECODES} decodes": target.ask(prompts.next(LONG_TOKENS))}


KINDS: Final[Mapping[str, Callable[[Target, Prompts], Rows]]] = {
    "short": short,
    "tiers": tiers,
    "queued": queued,
    "beside": beside_decodes,
}
