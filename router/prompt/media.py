"""Images, audio and video in a conversation: what tells them apart, and where the first stands.

vLLM hashes a medium into every block that holds part of it, as ``("mm", identifier,
offset)`` (``_gen_mm_extra_hash_keys`` of 0.32). The identifier is a hash of what the media
loader made of the bytes, the offset follows from how many tokens the model's own processor
puts in the medium's place (``BaseMultiModalProcessor.apply``). Neither can be had without the
model, its processor and the medium itself, so no such block has a key here. The blocks wholly
before the first medium are those of a text prompt, and `start_before_media` says how far
they are certain.

Where prompts are compared by text, a medium is a text of its own: equal ones are equal,
different ones differ from their beginning.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from router.prompt.chat_template import Message

MEDIUM_CHARS: Final = 4096
"""Length of the text that stands for a medium: about as many tokens as a picture of a megapixel."""

# Where parts keep a medium, in the order in which vLLM looks for it
# (``_parse_chat_message_content_mm_part``), and what kind of medium it is.
_MODALITIES: Final = {
    "image_url": "image",
    "image_embeds": "image",
    "audio_embeds": "audio",
    "video_embeds": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
    "source": "image",  # as /v1/messages has it
}
_FIELD_OF_TYPE: Final = {"input_image": "image_url", "image": "source"}

FIELDS: Final = frozenset(_MODALITIES)
"""The names under which parts keep a medium."""

_NESTED: Final = (list, dict)

# Fields of a medium's part that templates do not get.
_OWN_FIELDS: Final = FIELDS | {"type", "uuid"}

# What a client could write so that the model's processor takes it for a medium's place.
_PLACEHOLDER: Final = re.compile(r"<\W{0,2}(?:image|img|vision|video|audio|speech|media)", re.I)

# No text that a template writes, and none that a client does.
_SOMETHING_ELSE: Final = "\ue000"


@dataclass(frozen=True, slots=True)
class Shown:
    """A conversation with texts in the place of its media."""

    messages: Sequence[Message]
    modality_of: Mapping[str, str]
    """The kind of medium that each of these texts stands for; empty where there is none."""
    until_first: Sequence[Message]
    """The messages up to that with the first medium, and itself."""


def show_as_text(messages: Sequence[Message]) -> Shown:
    """Put texts in the place of all media; ``messages`` are not changed."""
    modality_of: dict[str, str] = {}
    made: list[Message] = []
    until_first = 0
    for message in messages:
        until_first += not modality_of
        content = message.get("content")
        if isinstance(content, list):
            shown = [_shown_part(part, modality_of) for part in content]
            made.append({**message, "content": shown})
        else:
            made.append(message)
    return Shown(made, modality_of, made[:until_first])


def put_back(conversation: Sequence[Message], shown: Shown) -> list[Message]:
    """Return what the template gets on the replica, as far as that is known.

    ``conversation`` is made of ``shown.messages``. Where content is a list, a
    medium is a part of its own kind. Where it is one string, the replica puts the model's
    placeholder into it, mostly in front (``_get_full_multimodal_text_prompt``): then
    the whole content is something else.
    """
    return [_put_back(one, shown.modality_of) for one in conversation]


def start_before_media(shown: str, put_back: str) -> str:
    """Return how much of a prompt certainly stands before its first medium.

    Both are the rendered prompt, with texts for media and with media. Nothing that
    depends on a medium, even on there being one, is in what they have in common.
    """
    shorter = min(len(shown), len(put_back))
    first_unlike = bisect_left(
        range(shorter), True, key=lambda at: shown[: at + 1] != put_back[: at + 1]
    )
    return shown[:first_unlike]


def may_hold_placeholder(texts: Iterable[str]) -> bool:
    """Whether a text could be taken for the place of a medium by the model's processor."""
    return any(_PLACEHOLDER.search(text) for text in texts)


def texts_of(value: object) -> Iterator[str]:
    """Yield every string in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from texts_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one)


def shortened(value: Any) -> Any:
    """Return a JSON value with the texts of `show_as_text` in the place of all media."""
    if isinstance(value, list):
        return [shortened(one) if isinstance(one, _NESTED) else one for one in value]
    if not isinstance(value, dict):
        return value
    if medium := _medium(value):
        return medium[1]
    return {key: shortened(one) if isinstance(one, _NESTED) else one for key, one in value.items()}


def part_types(messages: object) -> frozenset[str]:
    """Return the kinds of content parts, up to the first underscore.

    A replica uses an adapter of that name where the request names none
    (``_get_message_types`` and ``_get_active_default_mm_loras`` of vLLM).
    """
    contents = [
        one.get("content")
        for one in (messages if isinstance(messages, list) else ())
        if isinstance(one, dict)
    ]
    return frozenset(
        kind.split("_")[0]
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str)
    )


def _shown_part(part: Any, modality_of: dict[str, str]) -> Any:
    medium = _medium(part) if isinstance(part, dict) else None
    if medium is None:
        return part
    modality, text = medium
    modality_of[text] = modality
    extra = {key: one for key, one in part.items() if key not in _OWN_FIELDS}
    return {**extra, "type": "text", "text": text}


def _put_back(message: Message, modality_of: Mapping[str, str]) -> Message:
    content = message["content"]
    if isinstance(content, str):
        changed = any(text in content for text in modality_of)
        return {**message, "content": _SOMETHING_ELSE} if changed else message
    return {**message, "content": [_put_back_part(part, modality_of) for part in content]}


def _put_back_part(part: Mapping[str, Any], modality_of: Mapping[str, str]) -> Mapping[str, Any]:
    modality = modality_of.get(part.get("text", ""))
    if modality is None:
        return part
    return {"type": modality} | {key: part[key] for key in part if key not in ("type", "text")}


def _medium(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a medium's kind and the text that stands for it, None for any other part.

    The client's ``uuid`` identifies it where there is one, since vLLM then looks at
    nothing else, or its URL (with a data URL: all of its bytes), or its data.
    """
    kind, uuid = part.get("type"), part.get("uuid")
    if kind is None or uuid is not None:
        if FIELDS.isdisjoint(part):
            return None
        field = next((name for name in _MODALITIES if name in part), "")
    else:
        field = _FIELD_OF_TYPE.get(kind, kind) if isinstance(kind, str) else ""
    modality = _MODALITIES.get(field)
    value = part.get(field)
    if modality is None or (value is None and uuid is None):
        return None
    if field.endswith("_url"):
        value = value.get("url") if isinstance(value, dict) else value
    if field == "source" and isinstance(value, dict):
        value = source_url(value)
    if uuid is not None:
        value = {"uuid": str(uuid)}
    # A URL is hashed as it is: it can be megabytes of data.
    written = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    digest = xxhash.xxh3_128(f"{field} ".encode())
    digest.update(written.encode(errors="surrogatepass"))
    text = f"[{modality} {digest.hexdigest()}]"
    return modality, (text * (MEDIUM_CHARS // len(text) + 1))[:MEDIUM_CHARS]


def source_url(source: Mapping[str, Any]) -> str:
    """Return the URL that vLLM makes of an image of /v1/messages."""
    if source.get("type") == "url":
        return str(source.get("url", ""))
    media_type, data = source.get("media_type", "image/jpeg"), source.get("data", "")
    return f"data:{media_type};base64,{data}"
