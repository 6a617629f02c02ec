"""A request's prompt: its tokens as the replica will see them, and their keys.

Tokens are exact or not given out as exact. Where the replica may see others
(a template that comes with the request, state that only the replica has),
`Prompt.exact` is false; where nothing is known, there are no tokens and the
text itself is what prompts are compared by. Of a prompt with images, audio or
video only the tokens before the first of them are known (`router.prompt.media`).
"""

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

import aiohttp

from router.prompt import body_fields, media
from router.prompt.body_fields import Body
from router.prompt.inputs import ChatInput, PromptInput, TextInput, Truncation, read_input
from router.prompt.messages import Unsupported
from router.prompt.messages import conversation as converse
from router.prompt.prompt import TEXT_PIECE_CHARS, Prompt
from router.prompt.templates import ChatTemplate, Message, TemplateRefused, compiled, read_source
from router.prompt.tokenizer import (
    CHAT_PROBES,
    TEXT_PROBES,
    Comparison,
    Encoder,
    Loaded,
    Memo,
    MemoStats,
    MuchIsNew,
    Piece,
    ReadingTurns,
    Trust,
    compare,
    load_directory,
)

__all__ = ["TEXT_PIECE_CHARS", "Prompt", "PromptReader", "Trust"]

_log = logging.getLogger(__name__)

# A prompt with more characters to tokenize than this is worked on outside the event loop.
# Less takes all cores some milliseconds; in a thread, which waits for the loop's pauses again
# and again, it took 30 ms more on a busy machine.
_INLINE_CHARS: Final = 64 * 1024

# And so is one with more than this, known or not: to look it up and to join it takes 2 ms.
_LOOK_UP_CHARS: Final = 512 * 1024

# So many tokens right before a medium are not relied on: they could be other ones
# together with what the model's processor puts there (Gemma 3 joins newlines).
_UNSURE_TOKENS: Final = 8

# With fewer before the first medium, such a prompt is better remembered by its text:
# that reaches past the medium.
_FEWEST_TOKENS: Final = 256

# Where a replica may choose an adapter by the kinds of content.
_CHATS: Final = frozenset({"/v1/chat/completions", "/v1/messages"})


class PromptReader:
    """Reads prompts for the replicas of one model. Without a tokenizer, prompts are text."""

    def __init__(
        self,
        loaded: Loaded | None = None,
        *,
        chat_template: str | None = None,
        memo_bytes: int = 64 << 20,
    ) -> None:
        """``chat_template`` is the source of the one that overrides the model's own.

        Raises `ConfigError` when a template is none.
        """
        self.memo = Memo(memo_bytes)
        self._turns = ReadingTurns()
        self.max_model_len: int | None = None
        """What a replica said in `verify`."""
        self._special_tokens: Mapping[str, str] = {}
        self._encoder: Encoder | None = None
        self._templates: dict[str, ChatTemplate] = {}
        self._doubt: str | None = None
        self._chat_doubt: str | None = None
        self._media_doubt: str | None = None
        self.text_trust = self.chat_trust = Trust.DOUBTFUL
        if loaded is not None:
            self._use(loaded, chat_template)

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        chat_template: str | Path | None = None,
        memo_bytes: int = 64 << 20,
    ) -> "PromptReader":
        """Return the reader for the model in directory ``path``; with None, one of text.

        ``chat_template`` is a file, as for ``vllm serve --chat-template``.
        Raises `ConfigError`. Takes up to seconds for a large vocabulary.
        """
        if path is None:
            return cls(memo_bytes=memo_bytes)
        source = None if chat_template is None else read_source(Path(chat_template))
        return cls(load_directory(Path(path)), chat_template=source, memo_bytes=memo_bytes)

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can have tokens at all."""
        return self._encoder is not None

    @property
    def stats(self) -> MemoStats:
        """What was reused and what had to be computed, since start."""
        return self.memo.stats

    async def read(self, endpoint: str, body: Body) -> Prompt:
        """Return the prompt of a request to ``endpoint``; raise `BadRequest` for wrong types.

        What is long and new is worked on in a thread, so that the loop goes on.
        """
        chars = body_fields.rough_chars(body)
        if (prompt := self._read_known(endpoint, body, chars)) is not None:
            return prompt
        if self._encoder is None or not self._encoder.splits_text:
            return await asyncio.to_thread(self.read_now, endpoint, body)
        async with self._turns.turn(chars):
            # Of a burst with one beginning the first has read it for the others meanwhile.
            if (prompt := self._read_known(endpoint, body, chars)) is not None:
                return prompt
            return await asyncio.to_thread(self.read_now, endpoint, body)

    def _read_known(self, endpoint: str, body: Body, chars: int) -> Prompt | None:
        """Return a prompt that takes little time, None for others."""
        if chars > _LOOK_UP_CHARS:
            return None
        try:
            return self.read_now(endpoint, body, most_new_chars=_INLINE_CHARS)
        except MuchIsNew:
            return None

    def read_now(self, endpoint: str, body: Body, *, most_new_chars: float = inf) -> Prompt:
        """Return the prompt, in this thread; raise `MuchIsNew` if more is to be tokenized."""
        salt = body_fields.cache_salt(body) if endpoint != "/tokenize" else None
        messages = body.get("messages")
        try:
            given = read_input(endpoint, body, self._template)
            if isinstance(given, ChatInput):
                messages = given.messages
            prompt = self._read(given, self._trust(given), most_new_chars)
        except Unsupported as reason:
            prompt = Prompt(text=body_fields.stand_in(body), memo=self.memo, doubt=str(reason))
        model = body.get("model")
        prompt.model = model if isinstance(model, str) else None
        prompt.cache_salt = salt
        prompt.media_settings = body_fields.media_settings(body)
        if endpoint in _CHATS:
            prompt.part_types = media.part_types(messages)
        return prompt

    async def verify(
        self,
        session: aiohttp.ClientSession,
        replica_url: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Compare our tokens of the probes with a replica's ``POST /tokenize``.

        True when all are equal: tokens then count as exact. When some differ,
        tokens of that kind (text, chat) are not used from then on, and the log
        says why. False also when the replica could not be asked; that changes
        nothing.
        """
        if self._encoder is None:
            return False
        texts = [{"prompt": text} for text in TEXT_PROBES]
        try:
            of_text = await compare(session, replica_url, texts, self._claim, headers)
            of_chat = await compare(session, replica_url, CHAT_PROBES, self._claim, headers)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            _log.warning("%s: tokens could not be compared (%s)", replica_url, error)
            return False
        self._learn(of_text, of_chat)
        return self.text_trust.exact and of_text.equal is True and of_chat.equal is not False

    def _learn(self, of_text: Comparison, of_chat: Comparison) -> None:
        self.max_model_len = of_text.max_model_len or self.max_model_len
        self.text_trust = self.text_trust.after(of_text.equal)
        # Where chats are rendered by other means than /tokenize, its agreement is no proof.
        if self._chat_doubt is None:
            self.chat_trust = self.chat_trust.after(of_chat.equal)

    def _claim(self, body: Body) -> list[int] | None:
        """Return the tokens that we would give for a probe, however far they are trusted."""
        try:
            given = read_input("/tokenize", body, self._template)
            return self._read(given, Trust.PROVEN).token_ids
        except Unsupported:
            return None

    def _use(self, loaded: Loaded, chat_template: str | None) -> None:
        self._special_tokens = loaded.special_tokens
        self._encoder = Encoder(loaded.tokenizer, self.memo)
        sources = dict(loaded.templates)
        if chat_template is not None:
            # vLLM also takes the name of one of the model's templates here.
            sources = {"default": sources.get(chat_template, chat_template)}
        self._templates = {name: compiled(name, source) for name, source in sources.items()}
        self._doubt = loaded.doubt
        self._chat_doubt = loaded.chat_doubt
        self._media_doubt = loaded.media_doubt
        self.text_trust = Trust.PROVEN if loaded.doubt is None else Trust.DOUBTFUL
        self.chat_trust = self.text_trust
        if loaded.chat_doubt is not None:
            self.chat_trust = Trust.REFUTED
        for reason in filter(None, (loaded.doubt, loaded.chat_doubt)):
            _log.warning("tokens may not be those of the replicas: %s", reason)

    def _template(self, with_tools: bool) -> ChatTemplate | None:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default")

    def _trust(self, given: PromptInput) -> Trust:
        if isinstance(given, TextInput) or self.text_trust is Trust.REFUTED:
            return self.text_trust
        return self.chat_trust

    def _read(self, given: PromptInput, trust: Trust, most_new_chars: float = inf) -> Prompt:
        if isinstance(given, TextInput) and isinstance(given.prompt, list):
            return self._of_ids(given, given.prompt)
        if isinstance(given, ChatInput) and self._encoder is not None:
            shown = media.show_as_text(given.messages)
            given = replace(given, messages=shown.messages)
            text, conversation = self._rendered(given)
            if shown.modality_of:
                return self._with_media(
                    self._encoder,
                    given,
                    trust,
                    text=text,
                    conversation=conversation,
                    shown=shown,
                    most_new_chars=most_new_chars,
                )
        elif isinstance(given, TextInput) and isinstance(given.prompt, str):
            text = given.prompt
        else:
            raise Unsupported("there is no tokenizer")
        if self._encoder is None:
            return Prompt(text=text, memo=self.memo, doubt="there is no tokenizer")
        if trust is Trust.REFUTED:
            return Prompt(text=text, memo=self.memo, doubt=self._refuted())
        return self._tokenized(self._encoder, text, given, trust, most_new_chars)

    def _refuted(self) -> str:
        return self._chat_doubt or "a replica gave other tokens for the probes"

    def _rendered(
        self, given: ChatInput, conversation: Sequence[Message] | None = None
    ) -> tuple[str, Sequence[Message]]:
        """Return the prompt's text, and the conversation that the template got."""
        template = self._template(given.tools is not None)
        if template is None:
            raise Unsupported("the model has no chat template")
        if conversation is None:
            conversation = converse(given.messages, template.content_format, given.dialect)
        variables = {**self._special_tokens, **given.variables}
        try:
            text = template.render(
                conversation,
                tools=given.tools,
                documents=variables.pop("documents", None),
                add_generation_prompt=variables.pop("add_generation_prompt", False),
                continue_final_message=variables.pop("continue_final_message", False),
                variables=variables,
            )
        except TemplateRefused as error:
            raise Unsupported(str(error)) from error
        return text, conversation

    def _with_media(
        self,
        encoder: Encoder,
        given: ChatInput,
        trust: Trust,
        *,
        text: str,
        conversation: Sequence[Message],
        shown: media.Shown,
        most_new_chars: float,
    ) -> Prompt:
        """Return a prompt whose tokens end before its first medium."""
        doubt = self._no_start(encoder, given, trust, shown)
        start = ""
        if doubt is None:
            doubt = "what stands from the first medium on has no keys that could be known"
            real, _ = self._rendered(given, media.put_back(conversation, shown))
            start = media.start_before_media(text, real)
        pieces, ids = _without_end(_encoded(encoder, start, given, most_new_chars), _UNSURE_TOKENS)
        return Prompt(
            text=text,
            memo=self.memo,
            token_ids=ids if len(ids) >= _FEWEST_TOKENS else None,
            pieces=pieces,
            doubt=doubt,
            first_medium=next(iter(shown.modality_of)),
            rest_chars=len(text) - len(start),
        )

    def _no_start(
        self, encoder: Encoder, given: ChatInput, trust: Trust, shown: media.Shown
    ) -> str | None:
        """Return why not even the tokens before the first medium are known, None if they are."""
        if trust is Trust.REFUTED:
            return self._refuted()
        if given.truncation is not None:
            return "how much is kept of a prompt with media is not known"
        texts = list(media.texts_of([shown.until_first, given.tools, given.variables]))
        if media.may_hold_placeholder(texts) or any(map(encoder.holds_special, texts)):
            return "the model's processor may take a text for the place of a medium"
        return self._media_doubt

    def _of_ids(self, given: TextInput, prompt: list[int]) -> Prompt:
        ids, cut = self._truncated(prompt, given.truncation)
        pieces = self.memo.runs(ids)
        return Prompt(
            text=None, memo=self.memo, token_ids=ids, pieces=pieces, doubt=given.doubt or cut
        )

    def _tokenized(
        self, encoder: Encoder, text: str, given: PromptInput, trust: Trust, most_new_chars: float
    ) -> Prompt:
        pieces = _encoded(encoder, text, given, most_new_chars)
        every = array("I")
        for piece in pieces:
            every.extend(piece.ids)
        ids, cut = self._truncated(every.tolist(), given.truncation)
        if len(ids) != len(every):
            pieces = []
            if given.add_special_tokens and encoder.adds_ends:
                cut = "special tokens at the ends may survive truncation"
        doubt = given.doubt or cut
        if not trust.exact:
            doubt = doubt or self._doubt or "no replica has confirmed the tokens"
        return Prompt(text=text, memo=self.memo, token_ids=ids, pieces=pieces, doubt=doubt)

    def _truncated(
        self, ids: list[int], truncation: Truncation | None
    ) -> tuple[list[int], str | None]:
        """Return what the replica keeps of a prompt, and a doubt where that is not certain."""
        if truncation is None:
            return ids, None
        length = truncation.tokens
        if length < 0:
            if self.max_model_len is not None and len(ids) < self.max_model_len:
                return ids, None
            return ids, "how much the replica's context keeps is not known"
        if len(ids) <= length:
            return ids, None
        # Generating replicas keep the end unless told otherwise.
        return (ids[:length] if truncation.side == "right" else ids[len(ids) - length :]), None


def _encoded(
    encoder: Encoder, text: str, given: TextInput | ChatInput, most_new_chars: float
) -> list[Piece]:
    try:
        return encoder.encode(
            text, add_special_tokens=given.add_special_tokens, most_new_chars=most_new_chars
        )
    except (UnicodeEncodeError, TypeError) as error:
        raise Unsupported(f"the text is not Unicode ({error})") from error


def _without_end(pieces: Sequence[Piece], tokens: int) -> tuple[list[Piece], list[int]]:
    """Return pieces, and their tokens but the last ones; pieces that hold of those are left out."""
    every = [token for piece in pieces for token in piece.ids]
    ids = every[: max(0, len(every) - tokens)]
    whole: list[Piece] = []
    count = 0
    for piece in pieces:
        count += len(piece.ids)
        if count > len(ids):
            break
        whole.append(piece)
    return whole, ids
