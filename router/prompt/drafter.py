"""From a request's body to a draft of its prompt: rendered, but not tokenized yet.

`router.prompt.prompt_input` reads the body, and `Drafter` makes the draft.

Tokens are exact or not given out as exact. Where the replica may see others (a template that comes
with the request, state that only the replica has), `Prompt.exact` is false. Where nothing is known,
there are no tokens, and prompts are compared by the text itself. Of a prompt with images, audio or
video only the tokens before the first of them are known (`router.prompt.media`).
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

import orjson

from router.prompt import media
from router.prompt.chat_messages import CHAT, UnsupportedInputError
from router.prompt.chat_messages import conversation as converse
from router.prompt.chat_template import ChatTemplate, Message, TemplateRefusedError, compiled
from router.prompt.prompt import Prompt
from router.prompt.prompt_input import (
    Body,
    ChatInput,
    PromptInput,
    TextInput,
    Truncation,
    as_lists,
    read_input,
)
from router.prompt.replica_tokenizer import Question
from router.prompt.text_cutter import HugePartError
from router.prompt.token_cache import CutText, Encoder, Memo, Piece, TooManyTokensError
from router.prompt.token_trust import TOKENIZE, Trust
from router.prompt.tokenizer_files import TokenizerFiles
from warmroute_common.api_errors import BadRequestError


def too_long(tokens: int | str, max_tokens: int) -> BadRequestError:
    """Return the error for a prompt that no replica's context takes."""
    return BadRequestError(
        f"the prompt has {tokens} tokens, and the model's context takes {max_tokens}",
        code="context_length_exceeded",
    )


# So many tokens right before a medium are not relied on: they could be other ones
# together with what the model's processor puts there (Gemma 3 joins newlines).
_UNSURE_TOKENS: Final = 8

# With fewer before the first medium, such a prompt is better remembered by its text:
# that reaches past the medium.
_FEWEST_TOKENS: Final = 256

LONG_TOKEN_CHARS: Final = 16
"""A text with more characters than this for each token that the model takes is not tokenized: texts
have half as many, and the replica will refuse it."""
_UNCUT: Final = "a long part of it can only be tokenized at once, which takes too much memory"
_TOO_LONG: Final = "it is longer than what the model's context takes"
_ENDS_MAY_STAY: Final = "special tokens at the ends may survive truncation"

_ENCODED_CHARS: Final = 64 << 10

# If the tokenizer is Mistral's, vLLM shortens longer ids of tool calls in chats
# (``truncate_tool_call_ids``), and not in /tokenize.
_MISTRAL_ID_CHARS: Final = 9

# Where a replica may choose an adapter by the kinds of content.
_CHATS: Final = frozenset({"/v1/chat/completions", "/v1/messages"})

# Settings of a request that change what its media become.
_MEDIA_SETTINGS: Final = ("mm_processor_kwargs", "media_io_kwargs")


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is rendered and not tokenized yet."""

    prompt_of: Callable[[list[Piece] | None], Prompt]
    """Makes the prompt of the pieces of ``cut``; of None, if they are more than ``max_tokens``.

    It keeps nothing of the request's body."""
    cut: CutText | None = None
    """Text to tokenize; None if there is none."""
    chars: int = 0
    """How long ``cut`` is."""
    max_tokens: int | None = None
    is_refused: bool = False
    """Whether a prompt of more than ``max_tokens`` is an error."""
    question: Question | None = None
    """What a replica can be asked for the prompt's tokens; None for nothing."""
    told: Callable[[Sequence[int]], Prompt] | None = None
    """Makes the prompt of the tokens that a replica told. It keeps nothing of the body either."""

    def finish(self) -> Prompt:
        """Return the prompt, tokenizing what of it is new.

        Raises `BadRequestError` if it certainly has more tokens than the model takes.
        """
        pieces: list[Piece] | None = []
        if self.cut is not None:
            try:
                pieces = self.cut.pieces(self.max_tokens)
            except TooManyTokensError as error:
                if self.max_tokens and self.is_refused:
                    raise too_long(str(error), self.max_tokens) from None
                pieces = None
        return self.prompt_of(pieces)


class _Model(NamedTuple):
    files: TokenizerFiles
    encoder: Encoder


class Drafter:
    """Drafts the prompts for one model, by its tokenizer and templates if they are known."""

    def __init__(
        self, loaded: TokenizerFiles | None, chat_template: str | None, memo: Memo
    ) -> None:
        """``chat_template`` overrides the model's own. Raises `ConfigError` when one is none."""
        self.max_model_len: int | None = None
        """How many tokens the replicas' context has, where one has told."""
        self._memo = memo
        self._model = None if loaded is None else _Model(loaded, Encoder(loaded.tokenizer, memo))
        sources = {} if loaded is None else loaded.templates
        if chat_template is not None:
            sources = {"default": chat_template}
        self._templates = {name: compiled(name, source) for name, source in sources.items()}

    def template(self, with_tools: bool) -> ChatTemplate | None:
        """Return the template of a request with tools or without."""
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default")

    def draft(
        self,
        endpoint: str,
        body: Body,
        trust_in: Callable[[PromptInput], Trust],
        max_tokens: int | None = None,
        *,
        asks: bool = False,
    ) -> Draft:
        """Return the prompt of a request to ``endpoint``; raise `BadRequestError` for wrong types.

        ``trust_in`` says how far the tokens of an input are trusted. A prompt whose length
        says that it has more than ``max_tokens`` is not tokenized. ``asks``: whether a replica is
        asked for tokens that are not known here.
        """
        salt = _cache_salt(body) if endpoint != "/tokenize" else None
        messages = body.get("messages")
        given: PromptInput | None = None
        trust = Trust.EXACT
        try:
            given = read_input(endpoint, body, self.template)
            trust = trust_in(given)
            if isinstance(given, ChatInput):
                messages = given.messages
            draft = self._draft(given, trust, max_tokens)
        except UnsupportedInputError as reason:
            draft = self._of_text(_stand_in(body), str(reason))
        model, settings = body.get("model"), _media_settings(body)
        part_types = media.part_types(messages) if endpoint in _CHATS else frozenset[str]()

        def completed(pieces: list[Piece] | None) -> Prompt:
            prompt = draft.prompt_of(pieces)
            prompt.model = model if isinstance(model, str) else None
            prompt.cache_salt = salt
            prompt.media_settings = settings
            prompt.part_types = part_types
            return prompt

        question = told = None
        is_known = self._model is not None and trust is not Trust.REFUTED
        if asks and given is not None and not is_known:
            question, told = self._question(given, max_tokens), self._told(given, completed)
        return replace(draft, prompt_of=completed, question=question, told=told)

    def _told(
        self, given: PromptInput, prompt_of: Callable[[list[Piece] | None], Prompt]
    ) -> Callable[[Sequence[int]], Prompt]:
        """Return what makes a prompt of the tokens that a replica told for its `_question`."""
        truncation, adds_ends = given.truncation, given.add_special_tokens
        given_doubt, doubt_told = given.doubt, self._doubt_told(given)

        def told(ids: Sequence[int]) -> Prompt:
            prompt = prompt_of([])
            prompt.token_ids, cut = self._truncated(ids, truncation)
            if len(prompt.token_ids) != len(ids) and adds_ends:
                cut = _ENDS_MAY_STAY
            prompt.pieces = self._memo.runs(prompt.token_ids)
            prompt.doubt = given_doubt or cut or doubt_told
            return prompt

        return told

    def _question(self, given: PromptInput, max_tokens: int | None) -> Question | None:
        """Return what a replica can be asked for a prompt's tokens, None for nothing.

        Media are never sent: the tokens before the first medium are not worth that.
        """
        body: dict[str, Any] = {"add_special_tokens": given.add_special_tokens}
        path: str | None = TOKENIZE
        if isinstance(given, TextInput):
            if not isinstance(given.prompt, str):
                return None
            body["prompt"], chars = given.prompt, len(given.prompt)
        else:
            if given.dialect is not CHAT or not all(map(_is_text, given.messages)):
                return None
            path = self._model.files.chat_path if self._model else TOKENIZE
            chars = _chars(given.messages) + _chars(given.tools)
            variables = dict(given.variables)
            body["messages"], body["tools"] = given.messages, given.tools
            for name in ("add_generation_prompt", "continue_final_message"):
                body[name] = variables.pop(name, False)
            if path != TOKENIZE and "reasoning_effort" in variables:
                body["reasoning_effort"] = variables["reasoning_effort"]
            if variables:
                body["chat_template_kwargs"] = variables
        if path is None or (max_tokens and chars > max_tokens * LONG_TOKEN_CHARS):
            return None
        return Question.of(path, body, chars)

    def _doubt_told(self, given: PromptInput) -> str | None:
        """Return why a replica may tell other tokens than it uses for the request, or None."""
        is_known = self._model is not None and self._model.files.doubt is None
        if is_known or isinstance(given, TextInput):
            return None
        ids = [message.get("tool_call_id") for message in given.messages]
        ids += [call["id"] for each in given.messages for call in each.get("tool_calls") or ()]
        long = any(isinstance(each, str) and len(each) > _MISTRAL_ID_CHARS for each in ids)
        return "Mistral's tokenizers shorten the ids of tool calls" if long else None

    def _draft(self, given: PromptInput, trust: Trust, max_tokens: int | None) -> Draft:
        if isinstance(given, TextInput):
            if not isinstance(given.prompt, str):
                if max_tokens and len(given.prompt) > max_tokens and given.truncation is None:
                    raise too_long(len(given.prompt), max_tokens)
                return self._of_ids(given, given.prompt)
            return self._of_known_text(given.prompt, given, trust, max_tokens)
        if self._model is None:
            raise UnsupportedInputError("there is no tokenizer")
        shown = media.show_as_text(given.messages)
        if shown.modality_of:
            return self._with_media(self._model, given, trust, shown, max_tokens)
        text, _ = self._rendered(self._model, given)
        return self._of_known_text(text, given, trust, max_tokens)

    def _rendered(
        self, model: _Model, given: ChatInput, conversation: Sequence[Message] | None = None
    ) -> tuple[str, Sequence[Message]]:
        """Return the prompt's text, and the conversation that the template got."""
        template = self.template(given.tools is not None)
        if template is None:
            raise UnsupportedInputError("the model has no chat template")
        if conversation is None:
            conversation = converse(given.messages, template.content_format, given.dialect)
        variables = {**model.files.special_tokens, **given.variables}
        try:
            text = template.render(conversation, tools=given.tools, variables=variables)
        except TemplateRefusedError as error:
            raise UnsupportedInputError(str(error)) from error
        return text, conversation

    def _of_text(self, text: str, doubt: str) -> Draft:
        return Draft(lambda pieces: Prompt(rendered=text, memo=self._memo, doubt=doubt))

    def _of_ids(self, given: TextInput, prompt: Sequence[int]) -> Draft:
        ids, cut = self._truncated(prompt, given.truncation)
        doubt = given.doubt or cut
        return Draft(
            lambda pieces: Prompt(
                memo=self._memo, token_ids=ids, pieces=self._memo.runs(ids), doubt=doubt
            )
        )

    def _of_known_text(
        self, text: str, given: PromptInput, trust: Trust, max_tokens: int | None
    ) -> Draft:
        """Return the prompt of a text that is what the replica tokenizes."""
        model = self._model
        if model is None:
            return self._of_text(text, "there is no tokenizer")
        if trust is Trust.REFUTED:
            return self._of_text(text, _refuted(model))
        if max_tokens and len(text) > max_tokens * LONG_TOKEN_CHARS:
            return self._of_text(text, _TOO_LONG)
        try:
            cut = _cut(model.encoder, text, given)
        except HugePartError:
            return self._of_text(text, _UNCUT)

        truncation, given_doubt, untrusted = given.truncation, given.doubt, None
        adds_ends = given.add_special_tokens and model.encoder.adds_ends
        if trust is not Trust.EXACT:
            untrusted = model.files.doubt or "no replica has confirmed the tokens"

        def prompt_of(pieces: list[Piece] | None) -> Prompt:
            if pieces is None:
                return Prompt(rendered=text, memo=self._memo, doubt=_TOO_LONG)
            every = _ids_of(pieces)
            ids, doubt = self._truncated(every, truncation)
            if len(ids) != len(every):
                pieces = []
                if adds_ends:
                    doubt = _ENDS_MAY_STAY
            doubt = given_doubt or doubt or untrusted
            return Prompt(rendered=text, memo=self._memo, token_ids=ids, pieces=pieces, doubt=doubt)

        most = max_tokens if truncation is None else None
        return Draft(prompt_of, cut, len(text), most, is_refused=not (given_doubt or untrusted))

    def _with_media(
        self,
        model: _Model,
        given: ChatInput,
        trust: Trust,
        shown: media.Shown,
        max_tokens: int | None,
    ) -> Draft:
        """Return a prompt whose tokens end before its first medium."""
        doubt = _no_start(model, given, trust, shown)
        text, conversation = self._rendered(model, replace(given, messages=shown.messages))
        start = ""
        if max_tokens and len(text) > max_tokens * LONG_TOKEN_CHARS:
            doubt = _TOO_LONG
        if doubt is None:
            doubt = "what stands from the first medium on has no keys that could be known"
            real, _ = self._rendered(model, given, media.put_back(conversation, shown))
            start = media.start_before_media(text, real)

        first_medium, rest_chars = next(iter(shown.modality_of)), len(text) - len(start)

        def prompt_of(pieces: list[Piece] | None) -> Prompt:
            whole, ids = _without_end(pieces or [], _UNSURE_TOKENS)
            return Prompt(
                rendered=text,
                memo=self._memo,
                token_ids=ids if len(ids) >= _FEWEST_TOKENS else None,
                pieces=whole,
                doubt=doubt,
                first_medium=first_medium,
                rest_chars=rest_chars,
            )

        try:
            cut = _cut(model.encoder, start, given)
        except HugePartError:
            return self._of_text(text, _UNCUT)
        return Draft(prompt_of, cut, len(start), max_tokens)

    def _truncated(
        self, ids: Sequence[int], truncation: Truncation | None
    ) -> tuple[Sequence[int], str | None]:
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


def _no_start(model: _Model, given: ChatInput, trust: Trust, shown: media.Shown) -> str | None:
    """Return why not even the tokens before the first medium are known, None if they are."""
    if trust is Trust.REFUTED:
        return _refuted(model)
    if given.truncation is not None:
        return "how much is kept of a prompt with media is not known"
    texts = list(media.texts_of([shown.until_first, given.tools, given.variables]))
    if media.may_hold_placeholder(texts) or any(map(model.encoder.holds_special, texts)):
        return "the model's processor may take a text for the place of a medium"
    return model.files.media_doubt


def _refuted(model: _Model) -> str:
    return model.files.chat_doubt or "the replicas gave other tokens for the probes"


def _cache_salt(body: Body) -> str | None:
    """Return the salt that separates a tenant's KV; raise `BadRequestError` if it is unusable."""
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise BadRequestError("'cache_salt' must be a string that is not empty", param="cache_salt")
    return salt


def _media_settings(body: Body) -> str:
    """Return how the request wants its media processed; empty for no wish."""
    given = {name: body[name] for name in _MEDIA_SETTINGS if body.get(name)}
    return json.dumps(given, sort_keys=True) if given else ""


def _is_text(message: Message) -> bool:
    """Whether a chat's message certainly holds no medium."""
    content = message.get("content")
    return not isinstance(content, list) or all(
        isinstance(part, dict) and part.get("type") in CHAT.parts and media.FIELDS.isdisjoint(part)
        for part in content
    )


def _chars(value: object) -> int:
    """Return how long all strings in a JSON value are together."""
    return sum(map(len, media.texts_of(value)))


def _stand_in(body: Body) -> str:
    """Return a text that begins alike for requests whose prompts begin alike."""
    lines: list[Any] = [body.get(key) for key in ("tools", "instructions", "system")]
    for key in ("messages", "input", "prompt"):
        value = media.shortened(as_lists(body.get(key)))
        lines += value if isinstance(value, list) else [value]
    return "\n".join(_line(each) for each in lines if each is not None)


def _line(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # it writes no such depths as it reads
        return json.dumps(value, ensure_ascii=False)


def _cut(encoder: Encoder, text: str, given: PromptInput) -> CutText:
    try:
        for at in range(0, len(text), _ENCODED_CHARS):
            text[at : at + _ENCODED_CHARS].encode()
    except UnicodeEncodeError as error:
        raise UnsupportedInputError(f"the text is not Unicode ({error})") from error
    return encoder.cut(text, add_special_tokens=given.add_special_tokens)


def _ids_of(pieces: Sequence[Piece]) -> "array[int]":
    every = array("I")
    for piece in pieces:
        every.extend(piece.ids)
    return every


def _without_end(pieces: Sequence[Piece], tokens: int) -> tuple[list[Piece], Sequence[int]]:
    """Return the tokens but the last ones, and the pieces that hold none of the last ones."""
    every = _ids_of(pieces)
    ids = every[: max(0, len(every) - tokens)]
    ends = list(accumulate(len(piece.ids) for piece in pieces))
    return list(pieces[: bisect_right(ends, len(ids))]), ids
