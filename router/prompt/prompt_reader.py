"""Reads the prompts of one model: `PromptReader`.

`router.prompt.drafter` renders each prompt once. Long prompts are tokenized in a thread, one at a
time, and shorter ones first (`ReadingTurns`). The pieces of one prompt keep all cores busy, so
several prompts at once would all be ready only when the last one is.

The reader's tokens are compared with those of the replicas (`router.prompt.token_trust`). If they
differ, they are not used, and a replica is asked for the tokens of each long prompt
(`router.prompt.replica_tokenizer`).
"""

import asyncio
import heapq
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from router.prompt.chat_template import read_source
from router.prompt.drafter import Draft, Drafter, too_long
from router.prompt.prompt import Prompt
from router.prompt.prompt_input import Body, PromptInput, TextInput
from router.prompt.replica_tokenizer import ReplicaTokenizer
from router.prompt.request_body import LARGE_BODY_BYTES, off_loop
from router.prompt.token_cache import Memo
from router.prompt.token_trust import (
    CHAT_PROBES,
    HANGS,
    RENDER_CHAT,
    TEXT_PROBES,
    TOKENIZE,
    Agreement,
    Trust,
    compare,
)
from router.prompt.tokenizer_files import TokenizerFiles, load_directory

_log = logging.getLogger("warmroute.prompt")

_CHARS_PER_S: Final = 5_000_000.0
"""Roughly what one core tokenizes."""

_INLINE_CHARS: Final = 64 * 1024
"""A prompt with more characters to tokenize is tokenized in a thread.

A shorter one keeps all cores busy for some milliseconds. In a thread it took 30 ms longer on a busy
machine, because the thread waits for the event loop again and again.
"""


class ReadingTurns:
    """Lets one prompt at a time be tokenized.

    The order is the time at which each prompt would be ready if it were alone, so no prompt
    starves: another one passes it only if it arrives while the first could have been read.
    Use it from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._taken = False
        self._asked = 0

    @asynccontextmanager
    async def turn(self, chars: int) -> AsyncIterator[None]:
        """Wait for a turn to read ``chars`` characters, and hold it for the block."""
        if self._taken:
            await self._wait(chars)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, chars: int) -> None:
        loop = asyncio.get_running_loop()
        given = loop.create_future()
        self._asked += 1
        alone_s = loop.time() + chars / _CHARS_PER_S
        heapq.heappush(self._waiting, (alone_s, self._asked, given))
        try:
            await given
        except asyncio.CancelledError:
            # The turn may have been granted in the same iteration of the loop.
            if not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            given = heapq.heappop(self._waiting)[2]
            if not given.done():  # else its client has gone
                given.set_result(None)
                return
        self._taken = False


class PromptReader:
    """Reads prompts for the replicas of one model. Without a tokenizer, prompts stay text."""

    def __init__(
        self,
        loaded: TokenizerFiles | None = None,
        *,
        chat_template: str | None = None,
        memo: Memo | None = None,
        asks_replicas: bool = False,
    ) -> None:
        """``chat_template`` is the source of the one that overrides the model's own.

        ``memo`` may be shared with the readers of other models, and is 64 MiB by default.
        ``asks_replicas``: whether `read` is given replicas to ask for tokens.
        Raises `ConfigError` when a template is none.
        """
        self.memo = Memo(64 << 20) if memo is None else memo
        self._drafter = Drafter(loaded, chat_template, self.memo)
        self._turns = ReadingTurns()
        self._asks_replicas = asks_replicas
        self.has_tokenizer = loaded is not None
        """Whether prompts can have tokens at all."""
        by_files = Trust.EXACT if loaded and loaded.doubt is None else Trust.DOUBTFUL
        self._texts = Agreement(by_files)
        self._chats = Agreement(by_files)
        self._chat_path = loaded.chat_path if loaded else TOKENIZE
        self._chat_doubt = loaded.chat_doubt if loaded else None
        self._not_compared: dict[str, str] = {}
        """By replica, why its tokens could not be compared."""
        if loaded and loaded.chat_doubt:
            # Equal tokens of the probes would not prove that all chats are rendered alike.
            self._chats = Agreement(Trust.REFUTED)
        for reason in (loaded.doubt, loaded.chat_doubt) if loaded else ():
            if reason is not None:
                _log.warning("tokens may not be those of the replicas: %s", reason)

    @classmethod
    def load(
        cls,
        path: str | Path,
        chat_template: str | Path | None = None,
        memo: Memo | None = None,
        *,
        asks_replicas: bool = False,
    ) -> "PromptReader":
        """Return the reader for the model in directory ``path``.

        ``chat_template`` is a file, as for ``vllm serve --chat-template``.
        Raises `ConfigError`. Takes up to seconds for a large vocabulary.
        """
        source = None if chat_template is None else read_source(Path(chat_template))
        loaded = load_directory(Path(path))
        return cls(loaded, chat_template=source, memo=memo, asks_replicas=asks_replicas)

    async def read(
        self,
        endpoint: str,
        body: dict[str, Any],
        body_bytes: float = 0,
        max_tokens: int | None = None,
        *,
        replicas: ReplicaTokenizer | None = None,
    ) -> Prompt:
        """Return the prompt of a request to ``endpoint``; raise `BadRequestError` for wrong types.

        A prompt of more than ``max_tokens`` is a `BadRequestError` too; a text that is far longer
        is not tokenized. Long work runs in a thread and does not block the event loop.
        ``body_bytes`` is the body's length as it was sent; ``body`` is cleared if that is large.
        ``replicas`` are asked for the tokens of a prompt of which the reader has none that are
        theirs.
        """
        asks = replicas is not None and bool(self.asked())
        draft = await off_loop(body_bytes, self._draft, endpoint, body, max_tokens, asks=asks)
        if body_bytes > LARGE_BODY_BYTES:
            body.clear()  # its texts are not needed after rendering
        prompt = None
        if replicas is not None:
            prompt = await self._told(draft, replicas, body_bytes)
        if prompt is None:
            prompt = await self._finished(draft, body_bytes)
        if max_tokens is not None and prompt.exact and prompt.token_count > max_tokens:
            raise too_long(prompt.token_count, max_tokens)
        return prompt

    async def _told(
        self, draft: Draft, replicas: ReplicaTokenizer, body_bytes: float
    ) -> Prompt | None:
        """Return the prompt with the tokens that a replica tells; None if none does."""
        if draft.question is None or draft.told is None:
            return None
        kind = self._chats if draft.question.is_chat else self._texts
        if not kind.alike():
            return None
        ids = await replicas.tokens(draft.question, kind.alike(), kind.usual)
        return None if ids is None else await off_loop(body_bytes, draft.told, ids)

    async def _finished(self, draft: Draft, body_bytes: float) -> Prompt:
        if body_bytes > LARGE_BODY_BYTES:
            async with self._turns.turn(draft.chars):
                return await asyncio.to_thread(draft.finish)
        if _has_much_new(draft):
            async with self._turns.turn(draft.chars):
                # Of a burst with one beginning the first has read it for the others meanwhile.
                if _has_much_new(draft):
                    return await asyncio.to_thread(draft.finish)
        return draft.finish()

    def read_now(self, endpoint: str, body: Body) -> Prompt:
        """Return the prompt, in this thread."""
        return self._draft(endpoint, body).finish()

    async def verify(
        self,
        session: aiohttp.ClientSession,
        replica_url: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Compare our tokens of the probes with a replica's ``POST /tokenize``; True when equal.

        Tokens then count as exact. Where some differ, tokens of that kind (text, chat) are
        not used for this replica (`differs`), and the log says why. A replica that could not
        be asked changes nothing.
        """
        if not (self.has_tokenizer or self._asks_replicas):
            return False
        given = [{"prompt": text} for text in TEXT_PROBES]
        probes = CHAT_PROBES
        if self._chat_path is None or (self._chat_doubt is not None and not self._asks_replicas):
            probes = ()
        path = self._chat_path or TOKENIZE
        try:
            texts = await compare(session, replica_url, given, self._claim, headers=headers)
            chats = await compare(
                session, replica_url, probes, self._claim_of_chat, path=path, headers=headers
            )
        except TimeoutError:
            self._note_not_compared(replica_url, HANGS)
            return False
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            self._note_not_compared(replica_url, str(error) or type(error).__name__)
            return False
        self._not_compared.pop(replica_url, None)
        self._drafter.max_model_len = texts.max_model_len or self._drafter.max_model_len
        self._texts.note(replica_url, texts)
        self._chats.note(replica_url, chats)
        return texts.equal is True and chats.equal is not False and not self.asked()

    def answers(self, replica_url: str) -> tuple[int | None, int | None]:
        """Return what tells a replica's tokens of texts and of chats from those of others."""
        return self._texts.answers(replica_url), self._chats.answers(replica_url)

    def differs(self, replica_url: str) -> bool:
        """Whether tokens are used that this replica was found not to have."""
        return (
            self._texts.differs(replica_url)
            or self._chats.differs(replica_url)
            or self.deviates(replica_url)
        )

    def deviates(self, replica_url: str) -> bool:
        """Whether replicas are asked for tokens, and this one has others than most."""
        return any(each.deviates(replica_url) for each in self.asked().values())

    def asked(self) -> dict[str, Agreement]:
        """Return the kinds of prompts, texts or chats, that replicas are asked about."""
        if not self._asks_replicas:
            return {}
        is_refuted = self._texts.trust is Trust.REFUTED or not self.has_tokenizer
        kinds = {
            "texts": (self._texts, is_refuted),
            "chats": (self._chats, is_refuted or self._chats.trust is Trust.REFUTED),
        }
        return {
            name: agreement
            for name, (agreement, is_asked) in kinds.items()
            if is_asked and agreement.alike()
        }

    def why_asked(self, why_missing: str = "") -> str | None:
        """Return why replicas are asked for tokens, for a person; None if they are not.

        ``why_missing`` says why there is no tokenizer.
        """
        if not (kinds := self.asked()):
            return None
        why = self._chat_doubt if "texts" not in kinds else None
        if not self.has_tokenizer:
            why = f"its tokenizer is missing ({why_missing})"
        why = why or "the replicas' tokens differ from the router's"
        return f"{why}; replicas are asked for the tokens of its {' and '.join(kinds)}"

    def why_inexact(self, replica_urls: Sequence[str]) -> str | None:
        """Return why prompts for these replicas are not all matched by exact tokens, or None."""
        asked = self.asked()
        for name, agreement in asked.items():
            for url in filter(agreement.deviates, replica_urls):
                return f"{url} makes other tokens of its {name} than the other replicas"
        for kind, agreement in (("texts", self._texts), ("chats", self._chats)):
            for url in replica_urls if kind not in asked else ():
                if agreement.is_equal(url) is False:
                    return f"its tokens of {kind} differ from those of {url}"
        if self._chat_doubt is not None and "chats" not in asked:
            fix = ""
            if self._chat_path == RENDER_CHAT:
                fix = "; start vLLM with --enable-scale-out, and replicas are asked for the tokens"
            return f"{self._chat_doubt}, so its chats are matched by text{fix}"
        if self.has_tokenizer and self._texts.trust is Trust.DOUBTFUL:
            reasons = filter(None, map(self.not_compared, replica_urls))
            return f"its tokens are not confirmed ({next(reasons, 'no replica was compared')})"
        return None

    def is_confirmed(self) -> bool:
        """Whether a replica has our tokens of texts and of chats, as far as it has these."""
        return self._texts.is_confirmed and self._chats.trust is not Trust.REFUTED

    def compared(self, replica_url: str) -> tuple[bool | None, bool | None]:
        """Whether a replica was found to have our tokens of texts, and of chats; None: unknown."""
        return self._texts.is_equal(replica_url), self._chats.is_equal(replica_url)

    def not_compared(self, replica_url: str) -> str | None:
        """Why a replica's tokens could not be compared; `HANGS` if it did not answer in time."""
        return self._not_compared.get(replica_url)

    def _note_not_compared(self, replica_url: str, why: str) -> None:
        self._not_compared[replica_url] = why
        if not self.has_tokenizer:
            return
        _log.warning("%s: tokens could not be compared (%s)", replica_url, why)

    def forget(self, replica_url: str) -> None:
        """Forget what was found of a replica."""
        self._not_compared.pop(replica_url, None)
        self._texts.forget(replica_url)
        self._chats.forget(replica_url)

    def _draft(
        self, endpoint: str, body: Body, max_tokens: int | None = None, *, asks: bool = False
    ) -> Draft:
        return self._drafter.draft(endpoint, body, self._trust, max_tokens, asks=asks)

    def _trust(self, given: PromptInput) -> Trust:
        is_text = isinstance(given, TextInput) or self._texts.trust is Trust.REFUTED
        return self._texts.trust if is_text else self._chats.trust

    def _claim_of_chat(self, probe: Body) -> list[int] | None:
        return None if self._chat_doubt is not None else self._claim(probe)

    def _claim(self, probe: Body) -> list[int] | None:
        """Return the tokens that we would give for a probe, however far they are trusted."""
        draft = self._drafter.draft("/tokenize", probe, lambda given: Trust.EXACT)
        ids = draft.finish().token_ids
        return None if ids is None else list(ids)


def _has_much_new(draft: Draft) -> bool:
    if draft.cut is None or draft.chars <= _INLINE_CHARS:
        return False
    return draft.cut.new_chars() > _INLINE_CHARS
