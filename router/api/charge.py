"""What a request takes from its key's tokens, per minute and per day.

A prompt whose tokens are known exactly is charged by them. Everything else is charged by its size:
several prompts, prompts beside which a body has more to compute, and the bodies of all other
endpoints. The answer's ``usage`` corrects the estimate at its end.
"""

from contextlib import suppress
from typing import Final

import orjson

from router.api.grant import Grant
from router.policy import ParsedRequest
from router.prompt import media
from router.prompt.request_body import off_loop

_BYTES_PER_TOKEN: Final = 4
_MEDIA_BYTES_PER_TOKEN: Final = 256
"""Of audio and images, in forms and in answers; also of a stream's events."""
_CHATS: Final = ("messages", "input")
"""Fields whose parts may be media."""
_FREE: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""Endpoints that run no model."""


class Charge:
    """The tokens that one request has taken from its key."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._tokens = 0
        self._estimate = 0
        self._is_exact = False

    async def estimate(self, request: ParsedRequest) -> None:
        """Note the size of a request; its fields are gone when its prompt has been read."""
        if self._grant.limits_tokens:
            self._estimate = await off_loop(len(request.body), estimated_tokens, request)

    def take(self, prompt_tokens: int, now_s: float, *, is_exact: bool) -> None:
        """Charge a request that was read; raise `RateLimitedError` where tokens are used up.

        ``is_exact``: whether ``prompt_tokens`` are all that the replica computes.
        """
        self._is_exact = is_exact
        self._tokens = prompt_tokens if is_exact else max(prompt_tokens, self._estimate)
        self._grant.take_prompt(self._tokens, now_s)

    def settle(
        self,
        *,
        prompt_tokens: int | None,
        output_tokens: int | None,
        answer_bytes: int,
        is_json: bool,
        now_s: float,
    ) -> None:
        """Charge the answer, and correct the estimate; the counts are those of its ``usage``.

        Without ``usage`` the answer is charged by its size; ``is_json``: it is one JSON text.
        """
        tokens = output_tokens or 0
        if prompt_tokens is None and output_tokens is None:
            tokens = answer_bytes // (_BYTES_PER_TOKEN if is_json else _MEDIA_BYTES_PER_TOKEN)
        elif prompt_tokens is not None:
            more = prompt_tokens - self._tokens
            tokens += max(0, more) if self._is_exact else more
        self._grant.take_answer(tokens, now_s)


def _media_bytes(value: object) -> int:
    """Return how many bytes of a chat are images or audio."""
    return len(orjson.dumps(value)) - len(orjson.dumps(media.shortened(value)))


def estimated_tokens(request: ParsedRequest) -> int:
    """Return about how many tokens a replica computes for a body."""
    body = request.body
    if request.endpoint in _FREE:
        return 0
    if request.is_form:
        return len(body) // _MEDIA_BYTES_PER_TOKEN
    size = len(body) - request.media_bytes
    with suppress(orjson.JSONEncodeError):  # the parser reads deeper nesting than it writes
        size -= sum(_media_bytes(request.fields[name]) for name in _CHATS if name in request.fields)
    # Lists of short token ids have fewer bytes a token, but a comma each.
    return max(-(-size // _BYTES_PER_TOKEN), body.count(b","))
