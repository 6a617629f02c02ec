"""The prompt of one request: its tokens or text, and the keys that it is matched by."""

from collections.abc import Sequence
from typing import Final

import xxhash

from cacheengine.keys import HashScheme, prompt_extra_keys
from router.memo import Memo, Piece

TEXT_PIECE_CHARS: Final = 1024
"""The unit of `Prompt.text_chain`."""

# How many characters a token has, where there is no tokenizer.
_CHARS_PER_TOKEN: Final = 4


class Prompt:
    """The prompt of one request."""

    def __init__(
        self,
        *,
        text: str | None,
        memo: Memo,
        token_ids: list[int] | None = None,
        pieces: Sequence[Piece] = (),
        doubt: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.token_ids = token_ids
        """The tokens, or None where they are not known."""
        self.doubt = doubt
        """Why `exact` is false, or None."""
        self.cache_salt = cache_salt
        self._text = text
        self._memo = memo
        self._pieces = pieces
        self._chains: dict[object, list[bytes]] = {}

    @property
    def exact(self) -> bool:
        """Whether ``token_ids`` are certainly what the replica will see."""
        return self.token_ids is not None and self.doubt is None

    @property
    def text(self) -> str:
        """The rendered prompt; something that stands for it where it is not text."""
        if self._text is None:
            self._text = " ".join(map(str, self.token_ids or ()))
        return self._text

    @property
    def token_count(self) -> int:
        """The number of tokens; without a tokenizer, an estimate."""
        if self.token_ids is None:
            return -(-len(self.text) // _CHARS_PER_TOKEN)
        return len(self.token_ids)

    def chain(
        self,
        scheme: HashScheme,
        block_tokens: int,
        *,
        lora: tuple[str, str] | None = None,
    ) -> list[bytes]:
        """Return the keys of the prompt's full blocks; none where tokens are not known.

        What has been hashed for this or another prompt before is not hashed
        again. The list is shared between calls: do not change it.
        """
        if self.token_ids is None:
            return []
        name = (scheme, block_tokens, lora)
        keys = self._chains.get(name)
        if keys is None:
            every, first = prompt_extra_keys(cache_salt=self.cache_salt, lora=lora)
            keys = self._memo.chain(
                self._pieces,
                self.token_ids,
                scheme,
                block_tokens,
                extra_keys=every,
                first_extra_keys=first,
            )
            self._chains[name] = keys
        return keys

    def text_chain(self) -> list[int]:
        """Return a chain of 64-bit keys, one for each full `TEXT_PIECE_CHARS` of the text.

        Each stands for all of the text up to its end, and the salt.
        """
        previous = xxhash.xxh3_64_digest((self.cache_salt or "").encode())
        keys: list[int] = []
        text = self.text
        for end in range(TEXT_PIECE_CHARS, len(text) + 1, TEXT_PIECE_CHARS):
            piece = text[end - TEXT_PIECE_CHARS : end].encode(errors="surrogatepass")
            previous = xxhash.xxh3_64_digest(previous + piece)
            keys.append(int.from_bytes(previous, "big"))
        return keys

    def __repr__(self) -> str:
        kind = "exact" if self.exact else f"not exact: {self.doubt}"
        return f"Prompt({self.token_count} tokens, {kind})"
