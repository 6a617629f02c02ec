"""The last prompt of each session, coarsely: `LastPrompts`."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Final

from router.index.prompt_keys import KeyShape
from router.record.uncached import Change
from router.waste.outline import Outline

_MARKS: Final = 128
"""Keys of a prompt that are remembered, at equal distances."""
_ENTRY_BYTES: Final = 600
"""Size of an entry with its objects, without marks."""


@dataclass(slots=True, kw_only=True)  # not frozen: one is made for each request
class LastPrompt:
    """A prompt that was sent, by some of its keys."""

    step: int
    """Blocks from one mark to the next."""
    marks: "array[int]" = field(repr=False)
    """The key of each ``step``-th block, and that of the last one."""
    blocks: int
    shape: KeyShape | None
    """How its keys were made; keys of other shapes cannot be compared. None: by text."""
    prompt_tokens: int
    model: str | None
    outline: Outline = field(repr=False)
    turn: int = 1
    """Its number in its session, as far as that is remembered."""
    change: Change | None = None
    """What the client had changed in it."""

    @classmethod
    def of(
        cls,
        keys: Sequence[int],
        shape: KeyShape | None,
        prompt_tokens: int,
        *,
        model: str | None,
        outline: Outline,
        turn: int,
        change: Change | None,
    ) -> "LastPrompt":
        """Return what is remembered of a prompt with these block keys."""
        step = max(1, -(-len(keys) // _MARKS))
        marks = array("Q", keys[step - 1 :: step])
        marks.extend(keys[-1:])
        return cls(
            step=step,
            marks=marks,
            blocks=len(keys),
            shape=shape,
            prompt_tokens=prompt_tokens,
            model=model,
            outline=outline,
            turn=turn,
            change=change,
        )

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return _ENTRY_BYTES + 8 * len(self.marks) + self.outline.nbytes

    def common_blocks(self, keys: Sequence[int], seen_blocks: int) -> int:
        """Return how many blocks another prompt has in common with it, from the first one on.

        Between two marks that is as many as were seen before (``seen_blocks`` from the first on):
        this prompt was.
        """
        if self.blocks and self.blocks <= len(keys) and keys[self.blocks - 1] == self.marks[-1]:
            return self.blocks
        whole = self.marks[:-1]
        theirs = keys[self.step - 1 :: self.step]
        shortest = min(len(whole), len(theirs))
        least = next(compress(count(), map(ne, whole, theirs)), shortest) * self.step
        most = min(least + self.step, len(keys), self.blocks)
        return max(least, min(seen_blocks, most))


class LastPrompts:
    """Last prompts by session, at most ``max_bytes`` of them; the least recently used goes first.

    The size is estimated.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._prompts: OrderedDict[str, LastPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, session: str) -> LastPrompt | None:
        """Return a session's last prompt."""
        return self._prompts.get(session)

    def note(self, session: str, prompt: LastPrompt) -> None:
        """Remember a session's last prompt instead of the one before."""
        before = self._prompts.pop(session, None)
        self.used_bytes += prompt.nbytes - (0 if before is None else before.nbytes)
        self._prompts[session] = prompt
        while self.used_bytes > self.max_bytes and self._prompts:
            self.used_bytes -= self._prompts.popitem(last=False)[1].nbytes

    def check(self) -> None:
        """Raise AssertionError if the bound is not kept, or the sizes do not add up."""
        assert self.used_bytes == sum(each.nbytes for each in self._prompts.values())
        assert self.used_bytes <= self.max_bytes
