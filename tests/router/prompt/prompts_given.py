"""A prompt of given tokens or text, for tests of placing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from warmroute_common.keys import HashScheme, prompt_extra_keys


@dataclass
class GivenPrompt:
    """What `router.index.PromptView` asks for, without a tokenizer."""

    token_ids: Sequence[int] | None
    text: str = ""
    cache_salt: str | None = None

    @property
    def token_count(self) -> int:
        return len(self.text) // 4 if self.token_ids is None else len(self.token_ids)

    @property
    def affinity(self) -> bytes:
        return str((self.token_ids or self.text)[:256]).encode()

    def lora(self, adapters: Mapping[str, str]) -> tuple[str, str] | None:
        return None

    def chain(
        self, scheme: HashScheme, block_tokens: int, *, lora: tuple[str, str] | None = None
    ) -> list[bytes]:
        every, first = prompt_extra_keys(lora=lora)
        ids = self.token_ids or []
        return scheme.chain(ids, block_tokens, extra_keys=every, first_extra_keys=first)

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
