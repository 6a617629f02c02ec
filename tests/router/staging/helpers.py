"""What tests here share."""

from router.fleet.decision import Decision
from tests.router.fleet.helpers import candidate
from tests.router.fleet.helpers import decision as made_decision

KEYS = (bytes(range(32)), bytes(range(1, 33)), bytes(range(2, 34)))


def decision(gain_s: float = 0.2, keys: tuple[bytes, ...] = KEYS) -> Decision:
    picked = candidate("r")
    picked.prefetch_gain_s = gain_s
    return made_decision(picked, prefetch_keys=keys)
