"""Reads of a request's JSON body only what routing needs, and bounds what that costs.

Other fields are skipped and take no memory. Long strings of a large body are taken out before it is
parsed (`LongStrings`). A body with more than `MAX_VALUES` values or `MAX_MEMBERS` members is
refused, because a few bytes of either become an object of fifty or more. Strings have no limit of
their own: images travel in chats.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET

from warmroute_common.api_errors import BadRequestError

BodyBytes: TypeAlias = bytes | bytearray
"""A request's body; nobody changes it."""
LARGE_BODY_BYTES: Final = 256 * 1024
"""A larger body is parsed, rendered and assembled in a thread."""
MAX_VALUES: Final = 1_100_000
"""Values in a body: room for 2**20 token ids. Parsing more would hold the event loop for too long,
in a thread too."""
MAX_MEMBERS: Final = 120_000
"""Lists, objects, and members of objects in a body. A message has about 8."""

_VALUE_BYTES: Final = 40
"""About what a value takes with its place in a list."""
_MEMBER_BYTES: Final = 100
_MAX_QUOTES: Final = 4_000_000
"""Quotation marks in a body whose strings have to be told from its structure."""
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b"[{:,"))
_PART_BYTES: Final = 1 << 20
"""Scanned at once, in less than a millisecond: then other threads may run."""
_OPENING: Final = re.compile(rb"\s*\{\s*(\}?)")
_BACKSLASH: Final = ord("\\")
_GAPS: Final = 4096
_MEMBER_TEXT_BYTES: Final = 1024
"""Ids, and names of models and sessions, are shorter."""


class _Fields(msgspec.Struct):
    """The fields of a request with a prompt that routing reads."""

    model: Any = UNSET
    stream: Any = UNSET
    max_tokens: Any = UNSET
    max_completion_tokens: Any = UNSET
    max_output_tokens: Any = UNSET
    prompt_cache_key: Any = UNSET
    session_id: Any = UNSET
    user: Any = UNSET
    priority: Any = UNSET
    service_tier: Any = UNSET
    previous_response_id: Any = UNSET
    previous_input_messages: Any = UNSET
    cache_salt: Any = UNSET
    messages: Any = UNSET
    input: Any = UNSET
    prompt: Any = UNSET
    instructions: Any = UNSET
    system: Any = UNSET
    tools: Any = UNSET
    tool_choice: Any = UNSET
    documents: Any = UNSET
    chat_template: Any = UNSET
    chat_template_kwargs: Any = UNSET
    add_generation_prompt: Any = UNSET
    continue_final_message: Any = UNSET
    add_special_tokens: Any = UNSET
    reasoning: Any = UNSET
    reasoning_effort: Any = UNSET
    thinking: Any = UNSET
    output_config: Any = UNSET
    truncation: Any = UNSET
    truncate_prompt_tokens: Any = UNSET
    truncation_side: Any = UNSET
    padding: Any = UNSET
    prompt_embeds: Any = UNSET
    suffix: Any = UNSET
    kv_transfer_params: Any = UNSET
    mm_processor_kwargs: Any = UNSET
    media_io_kwargs: Any = UNSET
    n: Any = UNSET
    best_of: Any = UNSET
    use_beam_search: Any = UNSET
    echo: Any = UNSET
    prompt_logprobs: Any = UNSET
    background: Any = UNSET


_FIELDS: Final = msgspec.json.Decoder(_Fields)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KINDS: Final = {b"[": "an array", b'"': "a string", b"t": "a boolean", b"f": "a boolean"}


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


async def off_loop(
    body_bytes: float,
    work: Callable[_Given, _Result],
    *given: _Given.args,
    **named: _Given.kwargs,
) -> _Result:
    """Return ``work(*given)`` for a body: in a thread if the body is large, else at once."""
    if body_bytes > LARGE_BODY_BYTES:
        return await asyncio.to_thread(work, *given, **named)
    return work(*given, **named)


def prompt_fields(body: BodyBytes) -> dict[str, Any]:
    """Return the fields of a JSON object that routing needs; raise `BadRequestError`."""
    if not body:
        raise BadRequestError("the body is empty; send a JSON object", code="invalid_json")
    fields = _decoded(body, _FIELDS)
    return {
        name: value
        for name in _Fields.__struct_fields__
        if (value := getattr(fields, name)) is not UNSET
    }


def short_members(body: BodyBytes) -> dict[str, str | float | None]:
    """Return the members of a JSON object; NaN stands for lists, objects and what is long.

    The body is the replica's to check: what cannot be read has no members.
    """
    found: dict[str, str | float | None] = {}
    try:
        for name, raw in _MEMBERS.decode(body).items():
            text = bytes(memoryview(raw)[: _MEMBER_TEXT_BYTES + 1])
            is_short = len(text) <= _MEMBER_TEXT_BYTES and text[:1] not in (b"[", b"{")
            found[name] = msgspec.json.decode(text) if is_short else nan
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return found


def with_members(body: BodyBytes, changed: Mapping[str, str | int]) -> bytes:
    """Return the body, a JSON object, with other members; the rest stays as written.

    Raises `BadRequestError` if it is not one.
    """
    members: dict[str, msgspec.Raw] = _decoded(body, _MEMBERS)
    members |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changed.items()}
    return msgspec.json.encode(members)


def with_new_member(body: BodyBytes, name: str, value: str | msgspec.Raw) -> BodyBytes:
    """Return the body, a JSON object without this member, with it; the rest stays as written."""
    opening = _OPENING.match(body)
    assert opening is not None, "the body has been read"
    rest = memoryview(body)[opening.end() - len(opening[1]) :]
    comma = b"" if opening[1] else b","
    return joined([b"{", msgspec.json.encode({name: value})[1:-1], comma, rest])


REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` by which a vLLM with NixlConnector keeps a prompt's KV for another one."""


_OUTPUT_LIMITS: Final = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""The members that limit an answer, by the endpoints whose prefill another replica can do."""
_NOT_PREFILLED: Final = ("stream_options", "min_tokens", "return_token_ids")
"""Members that count for the answer alone, and that a prefill refuses or that make it longer."""


def may_split(path: str, fields: Mapping[str, Any]) -> bool:
    """Whether one replica may prefill a request's prompt for another one.

    Not if it has several prompts or answers, if it asks for something about the prompt itself, if
    only one replica can know its prompt, or if the client names KV to transfer itself.
    """
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return (
        path in _OUTPUT_LIMITS
        and not several
        and all(fields.get(each) in (None, 1) for each in ("n", "best_of"))
        and not any(fields.get(each) for each in ("echo", "use_beam_search", "background"))
        and all(
            fields.get(each) is None
            for each in ("prompt_logprobs", "prompt_embeds", "previous_response_id")
        )
        and not any(fields.get(each) == 0 for each in _OUTPUT_LIMITS[path])
        and "kv_transfer_params" not in fields
    )


def prefill_body(path: str, body: BodyBytes) -> bytes:
    """Return the body by which a replica computes a prompt and keeps its KV for another one."""
    members: dict[str, object] = {
        name: value
        for name, value in _decoded(body, _MEMBERS).items()
        if name not in _NOT_PREFILLED
    }
    members |= dict.fromkeys(_OUTPUT_LIMITS[path], 1)
    members |= {"stream": False, "kv_transfer_params": REMOTE_DECODE}
    if path == "/v1/responses":
        members["store"] = False
    return msgspec.json.encode(members)


def joined(parts: Sequence[bytes | memoryview]) -> BodyBytes:
    """Return parts of a body as one. No call copies much of a large one."""
    if sum(map(len, parts)) <= LARGE_BODY_BYTES:
        return b"".join(parts)
    whole = bytearray()
    for each in parts:
        for at in range(0, len(each), _PART_BYTES):
            whole += each[at : at + _PART_BYTES]
    return whole


def parsed_bytes(body: BodyBytes, more_values: int = 0) -> int:
    """Return about how much memory the values of a JSON body take, and more besides.

    Raises `BadRequestError` above the limits. Takes up to a second for a hostile body.
    """
    parts = range(0, len(body), _PART_BYTES)
    values, members = _counts(body[at : at + _PART_BYTES] for at in parts)
    if values > MAX_VALUES or members > MAX_MEMBERS:
        # So far what stands in strings was counted too.
        values, members = _counts(_outside_strings(body))
    values += more_values
    if values > MAX_VALUES:
        raise _too_many(f"{MAX_VALUES} values")
    if members > MAX_MEMBERS:
        raise _too_many(f"{MAX_MEMBERS} lists, objects and members of objects")
    return len(body) + values * _VALUE_BYTES + members * _MEMBER_BYTES


def _counts(parts: Iterable[BodyBytes]) -> tuple[int, int]:
    """Return how many values and members parts of a body have, until either are too many."""
    values = members = 0
    for part in parts:
        structure = part.translate(None, _NO_STRUCTURE)
        commas = structure.count(b",")
        values += commas
        members += len(structure) - commas
        if values > MAX_VALUES or members > MAX_MEMBERS:
            break
    return values + members, members


def _outside_strings(body: BodyBytes) -> Iterator[BodyBytes]:
    """Yield what stands between the strings of a body, in parts of limited size."""
    gaps: list[BodyBytes] = []
    at = quotes = 0
    while (start := body.find(b'"', at)) >= 0:
        while start - at > _PART_BYTES:
            yield body[at : at + _PART_BYTES]
            at += _PART_BYTES
        gaps.append(body[at:start])
        at = start + 1
        while (end := body.find(b'"', at)) >= 0:
            quotes += 1
            before, at = at, end + 1
            if body[end - 1] != _BACKSLASH:
                break
            inside = body[before:end]
            if (len(inside) - len(inside.rstrip(b"\\"))) % 2 == 0:
                break
        if end < 0:
            return  # not JSON
        if quotes > _MAX_QUOTES:
            raise _too_many(f"{_MAX_QUOTES} quotation marks")
        if len(gaps) == _GAPS:
            yield b"".join(gaps)
            gaps.clear()
    yield b"".join(gaps)
    yield from (body[each : each + _PART_BYTES] for each in range(at, len(body), _PART_BYTES))


def _too_many(what: str) -> BadRequestError:
    return BadRequestError(f"the body has more than {what}", code="too_many_values")


def _decoded(body: BodyBytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(body)
    except RecursionError:
        raise BadRequestError("the body's values are nested too deeply") from None
    except msgspec.ValidationError as error:
        start = bytes(body.lstrip()[:1])
        if start == b"{":  # a number that is out of range
            raise BadRequestError(
                f"the body is not valid JSON: {error}", code="invalid_json"
            ) from None
        kind = "null" if start == b"n" else _KINDS.get(start, "a number")
        raise BadRequestError(
            f"the body must be a JSON object, not {kind}", code="invalid_json"
        ) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
