"""The times of a real replica while the replica beside it computes, as under load it does."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from bench.calibration.__main__ import Measured, warm_up
from bench.calibration.kinds import Prompts
from bench.calibration.rates import Times
from bench.calibration.replica import Fleet
from bench.calibration.target import Target

_SETTLE_S: Final = 0.5
_BUSY_TOKENS: Final = 2_000
_BUSY_SEED: Final = -1_000


def measure(fleet: Fleet, *, rounds: int, seed: int, say: Callable[[str], None]) -> Times:
    """Return the times of the first replica while the others compute."""
    targets = [Target(each, settle_s=_SETTLE_S) for each in fleet.replicas]
    for each in targets:
        warm_up(each)
    measured, prompts = Measured(), Prompts(seed)
    with _busy([Target(each) for each in fleet.replicas[1:]]):
        for number in range(rounds):
            say(f"times of the real replica, round {number + 1} of {rounds}")
            measured.take(targets[0], prompts)
    return measured.times()


@contextmanager
def _busy(targets: Sequence[Target]) -> Iterator[None]:
    """Keep replicas computing prompts, one after the other, for the time of the block."""
    done = threading.Event()

    def compute(target: Target, prompts: Prompts) -> None:
        while not done.is_set():
            target.ask(prompts.next(_BUSY_TOKENS))

    threads = [
        threading.Thread(target=compute, args=(target, Prompts(_BUSY_SEED - index)))
        for index, target in enumerate(targets)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        done.set()
        for each in threads:
            each.join()
