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
    read_input,
)
from router.prompt.replica_tokenizer import Question
from router.prompt.token_cache import CutText, Encoder, Memo, Piece
from router.prompt.token_trust import TOKENIZE, Trust
from router.prompt.tokenizer_files import TokenizerFiles
from warmroute_common.api_errors import BadRequestError


def too_long(tokens: int, max_tokens: int) -> BadRequestError:
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

# A text with more characters than this for each token that the model takes is not tokenized: texts
# have half as many, and the replica will refuse it.
_LONG_TOKEN_CHARS: Final = 16
_TOO_LONG: Final = "it is longer than what the model's context takes"
_ENDS_MAY_STAY: Final = "special tokens at the ends may survive truncation"

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

    prompt_of: Callable[[list[Piece]], Prompt]
    """Makes the prompt of the pieces of ``cut``."""
    cut: CutText | None = None
    """Text to tokenize; None if there is none."""
    chars: int = 0
    """How long ``cut`` is."""
    unknown: PromptInput | None = None
    """The prompt's input, if a replica can be asked for its tokens (`Drafter.question`)."""

    def finish(self) -> Prompt:
        """Return the prompt, tokenizing what of it is new."""
        return self.prompt_of([] if self.cut is None else self.cut.pieces())


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
    ) -> Draft:
        """Return the prompt of a request to ``endpoint``; raise `BadRequestError` for wrong types.

        ``trust_in`` says how far the tokens of an input are trusted. A prompt whose length
        says that it has more than ``max_tokens`` is not tokenized.
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
        is_known = self._model is not None and trust is not Trust.REFUTED
        model = body.get("model")

        def completed(pieces: list[Piece]) -> Prompt:
            prompt = draft.prompt_of(pieces)
            prompt.model = model if isinstance(model, str) else None
            prompt.cache_salt = salt
            prompt.media_settings = _media_settings(body)
            if endpoint in _CHATS:
                prompt.part_types = media.part_types(messages)
            return prompt

        return replace(draft, prompt_of=completed, unknown=None if is_known else given)

    def told(self, draft: Draft, ids: Sequence[int]) -> Prompt:
        """Return the prompt of a draft for whose `question` a replica told these tokens."""
        prompt, given = draft.finish(), draft.unknown
        assert given is not None
        prompt.token_ids, cut = self._truncated(ids, given.truncation)
        if len(prompt.token_ids) != len(ids) and given.add_special_tokens:
            cut = _ENDS_MAY_STAY
        prompt.pieces = self._memo.runs(prompt.token_ids)
        prompt.doubt = given.doubt or cut or self._doubt_told(given)
        return prompt

    def question(self, draft: Draft, max_tokens: int | None) -> Question | None:
        """Return what a replica can be asked for a draft's tokens, None for nothing.

        Media are never sent: the tokens before the first medium are not worth that.
        """
        given = draft.unknown
        if given is None or (isinstance(given, TextInput) and isinstance(given.prompt, list)):
            return None
        body: dict[str, Any] = {"add_special_tokens": given.add_special_tokens}
        path: str | None = TOKENIZE
        if isinstance(given, TextInput):
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
        if path is None or (max_tokens and chars > max_tokens * _LONG_TOKEN_CHARS):
            return None
        return Question(path=path, body=body, chars=chars)

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
            if isinstance(given.prompt, list):
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

    def _of_ids(self, given: TextInput, prompt: list[int]) -> Draft:
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
        if max_tokens and len(text) > max_tokens * _LONG_TOKEN_CHARS:
            return self._of_text(text, _TOO_LONG)

        def prompt_of(pieces: list[Piece]) -> Prompt:
            every = _ids_of(pieces)
            ids, doubt = self._truncated(every, given.truncation)
            if len(ids) != len(every):
                pieces = []
                if given.add_special_tokens and model.encoder.adds_ends:
                    doubt = _ENDS_MAY_STAY
            doubt = given.doubt or doubt
            if trust is not Trust.EXACT:
                doubt = doubt or model.files.doubt or "no replica has confirmed the tokens"
            return Prompt(rendered=text, memo=self._memo, token_ids=ids, pieces=pieces, doubt=doubt)

        return Draft(prompt_of, _cut(model.encoder, text, given), len(text))

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
        if max_tokens and len(text) > max_tokens * _LONG_TOKEN_CHARS:
            doubt = _TOO_LONG
        if doubt is None:
            doubt = "what stands from the first medium on has no keys that could be known"
            real, _ = self._rendered(model, given, media.put_back(conversation, shown))
            start = media.start_before_media(text, real)

        def prompt_of(pieces: list[Piece]) -> Prompt:
            whole, ids = _without_end(pieces, _UNSURE_TOKENS)
            return Prompt(
                rendered=text,
                memo=self._memo,
                token_ids=ids if len(ids) >= _FEWEST_TOKENS else None,
                pieces=whole,
                doubt=doubt,
                first_medium=next(iter(shown.modality_of)),
                rest_chars=len(text) - len(start),
            )

        return Draft(prompt_of, _cut(model.encoder, start, given), len(start))

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
        value = media.shortened(body.get(key))
        lines += value if isinstance(value, list) else [value]
    return "\n".join(_line(each) for each in lines if each is not None)


def _line(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # it writes no such depths as it reads
        return json.dumps(value, ensure_ascii=False)


def _cut(encoder: Encoder, text: str, given: PromptInput) -> CutText:
    try:
        text.encode()
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
