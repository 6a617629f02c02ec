"""An event loop whose time is the model's: nothing is waited for, and nothing else runs.

Coroutines that sleep, wait with a timeout or call later do so in model seconds. When
nothing is left to do at the present time, the time of the next timer is the present.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")

_LONGEST_S: Final = 8e6
"""Three months: asyncio takes a timer for due by a billionth of a second, and of later times
a float cannot tell that."""


class StuckError(RuntimeError):
    """Everything waits, and no timer will wake anything."""


class _NoSelector(selectors.BaseSelector):
    """Selects nothing, and instead of waiting lets the loop's time pass."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept the loop's own wake-up socket, which nothing here uses."""
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Do nothing."""
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Pass the time until the next timer.

        Raises `StuckError` where there is none, and OverflowError at times that are too late.
        """
        if timeout is None:
            raise StuckError("every task waits and no timer is set")
        if timeout > 0:
            self.waited_s += timeout
            if self.waited_s > _LONGEST_S:
                raise OverflowError(
                    f"model time is {self.waited_s:.0f} s, {_LONGEST_S:.0f} at most"
                )
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return nothing."""
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that begins at 0 s and jumps from timer to timer."""

    def __init__(self) -> None:
        self._passing = _NoSelector()
        super().__init__(self._passing)

    def time(self) -> float:
        """Return the model's time in seconds."""
        return self._passing.waited_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in model time and return what it returns.

    Tasks that it leaves behind are cancelled. Raises what it raises, and `StuckError`.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
