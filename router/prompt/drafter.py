"""From a request's body to a draft of its prompt: rendered, but not tokenized yet.

`read_input` reads each endpoint's body into a `ChatInput` (rendered by a template) or a
`TextInput`; fields that only steer sampling are left alone. Defaults and precedence are those of
vLLM 0.32's request classes. `Drafter` makes the draft.

Tokens are exact or not given out as exact. Where the replica may see others (a template that comes
with the request, state that only the replica has), `Prompt.exact` is false. Where nothing is known,
there are no tokens, and prompts are compared by the text itself. Of a prompt with images, audio or
video only the tokens before the first of them are known (`router.prompt.media`).
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from msgspec import Meta

from router.prompt import anthropic, media
from router.prompt import chat_messages as responses
from router.prompt.chat_messages import (
    CHAT,
    RESPONSES,
    Dialect,
    UnsupportedInputError,
    chat_tools,
    check_messages,
    checked,
)
from router.prompt.chat_messages import conversation as converse
from router.prompt.chat_template import ChatTemplate, Message, TemplateRefusedError, compiled
from router.prompt.long_strings import LARGEST_ID
from router.prompt.prompt import Prompt
from router.prompt.token_cache import (
    CutText,
    Encoder,
    HugePartError,
    Memo,
    Piece,
    TooManyTokensError,
)
from router.prompt.token_trust import Trust
from router.prompt.tokenizer_files import TokenizerFiles
from warmroute_common.api_errors import BadRequestError

Body = Mapping[str, Any]

# Settings of the rendering itself, which a request cannot give as template variables.
# fmt: off
_NOT_VARIABLES: Final = frozenset({
    "self", "conversation", "messages", "tools", "chat_template", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})
# fmt: on

# Where an endpoint takes less than /v1/chat/completions does: the fields that it takes.
_RENDERING: Final = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
_TOKENIZED: Final = (*_RENDERING, "chat_template", "chat_template_kwargs")
_EMBEDDED: Final = (*_TOKENIZED, "truncate_prompt_tokens", "truncation_side")
_ANSWERED: Final = ("chat_template_kwargs", "kv_transfer_params", "tool_choice")


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Keep at most ``tokens`` (-1: what the model's context allows) of the prompt."""

    tokens: int
    side: str | None = None
    """``left`` keeps the end; None is the tokenizer's own side."""


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """A prompt that is text, or token ids already."""

    prompt: str | Sequence[int]
    add_special_tokens: bool
    truncation: Truncation | None = None
    doubt: str | None = None
    """Why the tokens may differ from the replica's all the same, or None."""


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """A conversation to be rendered."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    variables: Mapping[str, Any]
    add_special_tokens: bool
    truncation: Truncation | None = None
    dialect: Dialect = CHAT
    doubt: str | None = None


PromptInput = TextInput | ChatInput
TemplateFor = Callable[[bool], ChatTemplate | None]
"""The template used for a request (with tools or not)."""


def too_long(tokens: int | str, max_tokens: int) -> BadRequestError:
    """Return the error for a prompt that no replica's context takes."""
    return BadRequestError(
        f"the prompt has {tokens} tokens, and the model's context takes {max_tokens}",
        code="context_length_exceeded",
    )


def read_input(endpoint: str, body: Body, template_for: TemplateFor) -> PromptInput:
    """Return the prompt of ``body``.

    Raises `BadRequestError` for wrong types, and `UnsupportedInputError`.
    """
    match endpoint:
        case "/v1/chat/completions":
            return _chat(body)
        case "/v1/completions":
            return _completion(body)
        case "/v1/embeddings":
            return _embedding(body)
        case "/v1/responses":
            return _responses(body)
        case "/v1/messages":
            return _messages(body, template_for)
        case "/tokenize":
            return _tokenize(body)
    raise UnsupportedInputError(f"no prompt is read from {endpoint}")


def _chat(body: Body) -> ChatInput:
    messages = [_with_reasoning(one) for one in check_messages(body.get("messages"))]
    return _chat_input(body, messages, chat_tools(body.get("tools")))


def _chat_input(
    body: Body, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> ChatInput:
    if body.get("chat_template") is not None:
        raise UnsupportedInputError("a chat template of the request's own")
    _refuse_given_tokens(body)
    own = _typed(body, "chat_template_kwargs", dict[str, Any]) or {}
    if reserved := _NOT_VARIABLES & own.keys():
        raise UnsupportedInputError(f"chat_template_kwargs has {sorted(reserved)}")
    effort = _typed(body, "reasoning_effort", str)
    said = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": _typed(body, "documents", list[dict[str, str]]),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        said["enable_thinking"] = effort != "none"
    hidden = tools is not None and body.get("tool_choice") == "none"
    return ChatInput(
        messages=messages,
        tools=tools,
        # vLLM takes None and "auto" for unset, wherever they stand; fields override variables.
        variables={
            key: value
            for given in (own, said)
            for key, value in given.items()
            if value not in (None, "auto")
        },
        add_special_tokens=_flag(body, "add_special_tokens", False),
        truncation=_truncation(body),
        doubt="the replica may leave out tools when tool_choice is none" if hidden else None,
    )


def _only(body: Body, fields: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key in fields}


def _tokenize(body: Body) -> PromptInput:
    if "messages" not in body:
        text = checked(body.get("prompt"), str, "prompt")
        return TextInput(prompt=text, add_special_tokens=_flag(body, "add_special_tokens", True))
    messages = check_messages(body["messages"])
    return _chat_input(_only(body, _TOKENIZED), messages, chat_tools(body.get("tools")))


def _completion(body: Body) -> TextInput:
    if body.get("prompt_embeds") is not None or body.get("suffix") is not None:
        raise UnsupportedInputError("a prompt with embeddings or a suffix")
    _refuse_given_tokens(body)
    return _text_input(body, "prompt")


def _embedding(body: Body) -> PromptInput:
    if body.get("padding") is not None:
        raise UnsupportedInputError("padding")
    given, chats = _first(body.get("input")), _first(body.get("messages"))
    if isinstance(given, dict) or isinstance(_first(given), dict) or isinstance(chats, list):
        raise UnsupportedInputError("several conversations, or one in the field for texts")
    if "messages" not in body or "input" in body:
        return _text_input(body, "input")
    chat = {"add_generation_prompt": False, **_only(body, _EMBEDDED)}
    return _chat_input(chat, check_messages(body["messages"]), None)


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


def _responses(body: Body) -> ChatInput:
    if body.get("previous_response_id") is not None:
        raise UnsupportedInputError("what a previous response said is known only to its replica")
    if body.get("previous_input_messages") is not None:
        raise UnsupportedInputError("previous_input_messages")
    given = _as_lists(body.get("input"))
    goes_on = responses.continues(given)
    reasoning = _typed(body, "reasoning", dict[str, Any]) or {}
    chat = _only(body, _ANSWERED) | {
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        "add_special_tokens": True,  # so it is in vLLM, unlike for chat completions
        "reasoning_effort": _typed(reasoning, "effort", str),
    }
    messages = responses.messages(given, _typed(body, "instructions", str))
    made = _chat_input(chat, messages, responses.tools(body.get("tools")))
    cut = body.get("truncation", "disabled") != "disabled"
    return replace(made, dialect=RESPONSES, truncation=Truncation(tokens=-1) if cut else None)


def _messages(body: Body, template_for: TemplateFor) -> ChatInput:
    templates = [template_for(with_tools) for with_tools in (False, True)]
    merge = any(one is None or one.wants_system_first for one in templates)
    chat = anthropic.chat_body(body, merge_inline_system=merge)
    made = _chat_input(chat, chat["messages"], chat_tools(chat.get("tools")))
    used = frozenset[str]().union(*(one.variables for one in templates if one))
    if anthropic.disables_thinking(body) and used & {"reasoning_effort", "enable_thinking"}:
        raise UnsupportedInputError("how the replica turns thinking off is its own setting")
    return made


def _text_input(body: Body, name: str) -> TextInput:
    prompt = body.get(name)
    doubt = None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list | array):
        doubt = "only the first of several prompts is looked at" if len(prompt) > 1 else None
        prompt = prompt[0]
    return TextInput(
        prompt=_text_or_tokens(prompt, name),
        add_special_tokens=_flag(body, "add_special_tokens", True),
        truncation=_truncation(body),
        doubt=doubt,
    )


def _text_or_tokens(prompt: object, name: str) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, array) and prompt:
        return prompt  # `LongStrings` has checked it
    if not isinstance(prompt, list | array) or not prompt:
        raise BadRequestError(
            f"'{name}' must be a string, a list of token ids, or a list of those", param=name
        )
    # Exact types: True is an int to isinstance, and 70,000 checks must be quick.
    kinds = set(map(type, prompt))
    if kinds != {int} and kinds <= {int, bool, float}:
        raise UnsupportedInputError("token ids that are no whole numbers")
    if kinds != {int} or min(prompt) < 0 or max(prompt) > LARGEST_ID:
        raise BadRequestError(f"'{name}' holds something that is no token id", param=name)
    return prompt


def _with_reasoning(message: Message) -> Message:
    """Rename the older ``reasoning_content``, which a given ``reasoning`` overrides."""
    if "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None and message["reasoning_content"] is not None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def _refuse_given_tokens(body: Body) -> None:
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise UnsupportedInputError("token ids handed over in kv_transfer_params")


def _truncation(body: Body) -> Truncation | None:
    tokens = body.get("truncate_prompt_tokens")
    if tokens is None:
        return None
    if isinstance(tokens, bool | float | str):
        raise UnsupportedInputError(
            f"truncate_prompt_tokens is {tokens!r}, which a replica may read"
        )
    checked(tokens, Annotated[int, Meta(ge=-1)], "truncate_prompt_tokens")
    side = _typed(body, "truncation_side", Literal["left", "right"])
    return Truncation(tokens=tokens, side=side)


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name, default)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        raise UnsupportedInputError(
            f"'{name}' is {value!r}, which a replica may take for true or false"
        )
    return bool(checked(value, bool, name))


def _typed(body: Body, name: str, kind: Any) -> Any:
    value = body.get(name)
    return None if value is None else checked(value, kind, name)


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

_ENCODED_CHARS: Final = 64 << 10

# Where a replica may choose an adapter by the kinds of content.
_CHATS: Final = frozenset({"/v1/chat/completions", "/v1/messages"})

# Settings of a request that change what its media become.
_MEDIA_SETTINGS: Final = ("mm_processor_kwargs", "media_io_kwargs")


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is rendered and not tokenized yet."""

    prompt_of: Callable[[list[Piece] | TooManyTokensError], Prompt]
    """Makes the prompt of the pieces of ``cut``, or if these have more than ``max_tokens``.

    It keeps nothing of the request's body."""
    cut: CutText | None = None
    """Text to tokenize; None if there is none."""
    chars: int = 0
    """How long ``cut`` is."""
    max_tokens: int | None = None

    def finish(self) -> Prompt:
        """Return the prompt, tokenizing what of it is new.

        Raises `BadRequestError` if it certainly has more tokens than the model takes.
        """
        try:
            pieces = [] if self.cut is None else self.cut.pieces(self.max_tokens)
        except TooManyTokensError as error:
            return self.prompt_of(error)
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
    ) -> Draft:
        """Return the prompt of a request to ``endpoint``; raise `BadRequestError` for wrong types.

        ``trust_in`` says how far the tokens of an input are trusted. A prompt whose length
        says that it has more than ``max_tokens`` is not tokenized.
        """
        salt = _cache_salt(body) if endpoint != "/tokenize" else None
        messages = body.get("messages")
        try:
            given = read_input(endpoint, body, self.template)
            if isinstance(given, ChatInput):
                messages = given.messages
            draft = self._draft(given, trust_in(given), max_tokens)
        except UnsupportedInputError as reason:
            draft = self._of_text(_stand_in(body), str(reason))
        model, settings = body.get("model"), _media_settings(body)
        part_types = media.part_types(messages) if endpoint in _CHATS else frozenset[str]()

        def completed(pieces: list[Piece] | TooManyTokensError) -> Prompt:
            prompt = draft.prompt_of(pieces)
            prompt.model = model if isinstance(model, str) else None
            prompt.cache_salt = salt
            prompt.media_settings = settings
            prompt.part_types = part_types
            return prompt

        return replace(draft, prompt_of=completed)

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

        def prompt_of(pieces: list[Piece] | TooManyTokensError) -> Prompt:
            if isinstance(pieces, TooManyTokensError):
                if max_tokens and not (given_doubt or untrusted):
                    raise too_long(str(pieces), max_tokens) from None
                return Prompt(rendered=text, memo=self._memo, doubt=_TOO_LONG)
            every = _ids_of(pieces)
            ids, doubt = self._truncated(every, truncation)
            if len(ids) != len(every):
                pieces = []
                if adds_ends:
                    doubt = "special tokens at the ends may survive truncation"
            doubt = given_doubt or doubt or untrusted
            return Prompt(rendered=text, memo=self._memo, token_ids=ids, pieces=pieces, doubt=doubt)

        most = max_tokens if truncation is None else None
        return Draft(prompt_of, cut, len(text), most)

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

        def prompt_of(pieces: list[Piece] | TooManyTokensError) -> Prompt:
            known = [] if isinstance(pieces, TooManyTokensError) else pieces
            whole, ids = _without_end(known, _UNSURE_TOKENS)
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


def _stand_in(body: Body) -> str:
    """Return a text that begins alike for requests whose prompts begin alike."""
    lines: list[Any] = [body.get(key) for key in ("tools", "instructions", "system")]
    for key in ("messages", "input", "prompt"):
        value = media.shortened(_as_lists(body.get(key)))
        lines += value if isinstance(value, list) else [value]
    return "\n".join(_line(each) for each in lines if each is not None)


def _as_lists(value: Any) -> Any:
    """Return a prompt's field with lists in place of arrays of token ids."""
    if isinstance(value, list) and any(isinstance(each, array) for each in value):
        return [_as_lists(each) for each in value]
    return value.tolist() if isinstance(value, array) else value


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
