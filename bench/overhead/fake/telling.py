"""A fake replica whose tokens and keys a router can know: a vLLM with KV events, without an agent.

``/v1/models`` names its tokenizer's directory, ``/tokenize`` gives tokens that
prove it, ``/kv_event_sources`` says where each prompt's blocks are published
when it is answered. Tokens and keys of all prompts that will come are made
before anything is measured, and found again by a body's hash.
"""

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import orjson
import xxhash

from bench.overhead.fake.http import Handler
from bench.overhead.prompts import MODEL, PATH
from router.prompt.prompt_reader import PromptReader
from simulator.kv_stream import KvStream
from warmroute_common.api_errors import BadRequestError
from warmroute_common.keys import HashScheme, key64

BLOCK_TOKENS: Final = 16
"""vLLM's default."""
_MAX_TOKENS: Final = 131_072


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as its replica sees it."""

    token_ids: bytes
    """Four bytes each, in this machine's order."""
    keys: bytes
    """Of its full blocks, eight bytes each."""


Prompts = dict[int, Known]
"""By the hash of a request's body."""


def known_prompts(bodies: Iterable[bytes], tokenizer: Path) -> Prompts:
    """Return the tokens and keys of prompts; raises `ConfigError` without a tokenizer."""
    reader = PromptReader.load(tokenizer)
    return {xxhash.xxh3_64_intdigest(each): _known(each, reader) for each in bodies}


def _known(body: bytes, reader: PromptReader) -> Known:
    prompt = reader.read_now(PATH, orjson.loads(body))
    keys = prompt.chain(HashScheme(), BLOCK_TOKENS)
    return Known(
        token_ids=array("I", prompt.token_ids or ()).tobytes(),
        keys=array("Q", map(key64, keys)).tobytes(),
    )


def write_prompts(path: Path, prompts: Prompts) -> None:
    """Write them for the replicas' process."""
    path.write_bytes(msgspec.msgpack.encode(prompts))


def read_prompts(path: Path) -> Prompts:
    """Read what `write_prompts` has written."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Prompts)


class Telling:
    """What one replica tells; what it has stored it does not tell again."""

    def __init__(self, prompts: Prompts, stream: KvStream) -> None:
        self._prompts = prompts
        self._stream = stream
        self._stored: set[int] = set()

    def note(self, body: bytes) -> None:
        """Publish the blocks of a prompt that has been answered, in one event.

        Raises KeyError for a prompt that was not made ready.
        """
        known = self._prompts[xxhash.xxh3_64_intdigest(body)]
        keys = array("Q", known.keys)
        first = next((at for at, key in enumerate(keys) if key not in self._stored), len(keys))
        if first == len(keys):
            return
        self._stored.update(keys[first:])
        self._stream.publish(msgspec.msgpack.encode([0.0, [_event(known, keys, first)], 0]))


def _event(known: Known, keys: "array[int]", first: int) -> dict[str, object]:
    """Return vLLM's event of the blocks from ``first`` on."""
    ids = array("I", known.token_ids)[first * BLOCK_TOKENS : len(keys) * BLOCK_TOKENS]
    return {
        "type": "BlockStored",
        "block_hashes": keys[first:].tolist(),
        "parent_block_hash": keys[first - 1] if first else None,
        "token_ids": ids.tolist(),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (len(keys) - first),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def handlers(tokenizer: Path, stream: KvStream) -> Mapping[bytes, Handler]:
    """Return what such a replica answers beside completions."""
    reader = PromptReader.load(tokenizer)
    source = {"endpoint": stream.endpoint, "replay_endpoint": stream.replay_endpoint, "topic": ""}

    def tokenize(body: bytes) -> bytes | None:
        try:
            ids = reader.read_now("/tokenize", orjson.loads(body)).token_ids
        except BadRequestError:
            return None
        if ids is None:
            return None
        told = {"count": len(ids), "max_model_len": _MAX_TOKENS, "tokens": list(ids)}
        return orjson.dumps(told)

    return {
        b"/tokenize": tokenize,
        b"/kv_event_sources": lambda _: orjson.dumps({"0": source}),
        **model_handlers(str(tokenizer)),
    }


def model_handlers(root: str) -> Mapping[bytes, Handler]:
    """Return what every replica answers; ``root``: where its model comes from."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": root}
    listed = orjson.dumps({"object": "list", "data": [model]})
    return {b"/health": lambda _: b"", b"/v1/models": lambda _: listed}
