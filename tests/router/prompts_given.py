"""A prompt of given tokens or text, for tests of placing."""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from cacheengine.keys import HashScheme


@dataclass
class GivenPrompt:
    """What `router.assess.PromptView` asks for, without a tokenizer."""

    token_ids: Sequence[int] | None
    text: str = ""

    @property
    def token_count(self) -> int:
        return len(self.text) // 4 if self.token_ids is None else len(self.token_ids)

    def chain(self, scheme: HashScheme, block_tokens: int) -> list[bytes]:
        return scheme.chain(self.token_ids or [], block_tokens)

    def text_chain(self) -> list[int]:
        return [
            xxhash.xxh3_64_intdigest(self.text[:end].encode())
            for end in range(1024, len(self.text) + 1, 1024)
        ]


def tokens(count: int, *, start: int = 0) -> GivenPrompt:
    """Return a prompt of ``count`` tokens; equal starts give equal prefixes."""
    return GivenPrompt(range(start, start + count))


def text(characters: int, *, letter: str = "a") -> GivenPrompt:
    """Return a prompt of which only the text is known."""
    return GivenPrompt(None, letter * characters)
