"""The handlers of the agent's HTTP paths.

`warmroute_common.agent_protocol` defines the bodies. A call names chunks by their keys or by the
tokens of a prompt, from which the agent computes the keys as vLLM does.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

import msgspec
from aiohttp import web

from cacheengine.agent.agent_requests import (
    MAX_WAIT_S,
    as_json,
    as_msgpack,
    decode,
    number,
    seconds,
    wait_for_engine_event,
    wait_for_promotion,
)
from cacheengine.agent.move_jobs import MoveJobs
from cacheengine.agent.served_tokenizer import ServedTokenizer
from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.engine_metrics import render_metrics
from cacheengine.identity.kv_versions import KvVersions
from cacheengine.record import TransferMeter
from warmroute_common import agent_protocol as wire
from warmroute_common.api_errors import BadRequestError, NotFoundError
from warmroute_common.keys import HashScheme, chunk_keys, prompt_extra_keys

_MIN_STALL_S: Final = 0.1
MAX_CHUNKS: Final = 65_536
"""Most chunks that one call may name."""


@dataclass(slots=True, eq=False)
class AgentHandlers:
    """Answers requests from one engine; ``move_jobs`` runs the moves."""

    engine: CacheEngine
    identity: wire.ReplicaIdentity
    move_jobs: MoveJobs
    meter: TransferMeter
    versions: KvVersions
    tokenizer: ServedTokenizer
    _scheme: HashScheme = field(init=False)
    _reading: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._scheme = HashScheme(self.identity.hash_algorithm, self.identity.hash_seed)
        self._reading = asyncio.Semaphore(1)

    def routes(self) -> list[web.RouteDef]:
        """Return the paths that are served."""
        return [
            web.get("/health", self.health),
            web.get("/info", self.info),
            web.post("/lookup", self.lookup),
            web.get("/tokenizer", self.tokenizer_manifest),
            web.get("/tokenizer/{sha256}", self.tokenizer_file),
            web.get("/snapshot", self.snapshot),
            web.get("/events", self.events),
            web.get("/metrics", self.metrics),
            web.post("/prefetch", self.prefetch),
            web.post("/pin", self.pin),
            web.post("/unpin", self.unpin),
            web.post("/clear", self.clear),
            web.post("/move", self.move),
            web.get("/moves/{event_id}", self.move_status),
        ]

    # --- reads ---

    async def health(self, request: web.Request) -> web.Response:
        """Report that the agent is alive."""
        return web.json_response({"status": "ok"})

    async def info(self, request: web.Request) -> web.Response:
        """Report the replica's identity, how its keys are computed, and its tiers."""
        return as_json(
            wire.InstanceInfo(
                **msgspec.structs.asdict(self.identity),
                incarnation=self.engine.incarnation,
                tiers=self.engine.tier_info(),
                compute=self.engine.steps.rates(),
                layout=self.engine.layout.fingerprint(),
                version=version("warmroute"),
            )
        )

    async def tokenizer_manifest(self, request: web.Request) -> web.Response:
        """Return which files the replica's tokenizer is made of."""
        return as_json(await asyncio.to_thread(self.tokenizer.manifest))

    async def tokenizer_file(self, request: web.Request) -> web.Response:
        """Return one of these files."""
        async with self._reading:
            sha256 = request.match_info["sha256"]
            data = await asyncio.to_thread(self.tokenizer.content, sha256)
        return web.Response(body=data, content_type="application/octet-stream")

    async def lookup(self, request: web.Request) -> web.Response:
        """Report how much of a prompt all tiers together, or one of them, hold."""
        call = await decode(request, wire.LookupRequest)
        keys = await self._keys_of(call)
        if call.tier is None:
            tiers = self.engine.match(keys)
        else:
            tiers = [call.tier] * self.engine.held_in(keys, call.tier)
        chunk_tokens = self.identity.chunk_tokens
        return as_json(
            wire.LookupReply(
                matched_tokens=len(tiers) * chunk_tokens,
                tokens_by_tier={tier: n * chunk_tokens for tier, n in Counter(tiers).items()},
                tiers=tiers,
            )
        )

    async def snapshot(self, request: web.Request) -> web.Response:
        """Return all keys by tier."""
        # Packing a million keys takes a second, so it does not run on the event loop.
        snapshot = await asyncio.to_thread(self.engine.snapshot)
        return as_msgpack(snapshot)

    async def events(self, request: web.Request) -> web.Response:
        """Return the changes after an event number; wait up to ``wait_s`` for the first one."""
        after = number(request, "after", int)
        wait_s = min(number(request, "wait_s", float), MAX_WAIT_S)
        incarnation = request.query.get("incarnation", self.engine.incarnation)
        if incarnation == self.engine.incarnation:
            await wait_for_engine_event(self.engine, after, wait_s)
            batch = self.engine.events_after(after)
            if batch is not None:
                return as_msgpack(batch)
        return web.json_response(
            {"error": f"events after {after} of {incarnation} are lost; take a new /snapshot"},
            status=410,
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        text = render_metrics(self.engine, transfer=self.meter.stats())
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    # --- controls ---

    async def prefetch(self, request: web.Request) -> web.Response:
        """Promote chunks to the CPU tier, and pin them for ``pin_s``."""
        call = await decode(request, wire.PrefetchRequest)
        pin_s = seconds("pin_s", call.pin_s)
        keys = await self._stored(_digests(call.keys), call.lora)
        promotion = self.engine.promote(keys, pin_s=pin_s)
        await wait_for_promotion(promotion, min(call.wait_s, MAX_WAIT_S))
        # One consistent set of counts; the reads continue meanwhile.
        counts = promotion.counts
        return as_json(
            wire.PrefetchReply(
                resident=counts.resident,
                promoted=counts.promoted,
                pending=counts.pending,
                missing=counts.missing,
                promoted_bytes=counts.promoted * self.identity.chunk_bytes,
            )
        )

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a prefix's chunks in a tier."""
        return await self._change_pins(request, self.engine.pin)

    async def unpin(self, request: web.Request) -> web.Response:
        """End the pins of `pin`."""
        return await self._change_pins(request, self.engine.unpin)

    async def _change_pins(
        self, request: web.Request, change: Callable[[Sequence[bytes], str], int]
    ) -> web.Response:
        call = await decode(request, wire.PinRequest)
        chunks = change(await self._some_keys_of(call), call.tier)
        return as_json(wire.PinReply(num_tokens=chunks * self.identity.chunk_tokens))

    async def clear(self, request: web.Request) -> web.Response:
        """Drop all chunks of some tiers, or only the named chunks."""
        call = await decode(request, wire.ClearRequest)
        names_none = call.tokens is None and call.keys is None
        if names_none and call.cache_salt is not None:
            raise BadRequestError("'cache_salt' belongs to a prompt: give its 'tokens' too")
        keys = None if names_none else await self._some_keys_of(call)
        dropped = await asyncio.to_thread(self.engine.clear, call.tiers, keys)
        if "remote" not in dropped:
            return as_json(wire.ClearReply(dropped=dropped))
        # Chunks that this replica does not know, too: others, or an earlier process, stored them.
        removed = await asyncio.to_thread(self.engine.clear_shared, keys)
        if removed is None:
            return as_json(wire.ClearReply(dropped=dropped, not_cleared=["remote"]))
        return as_json(wire.ClearReply(dropped={**dropped, "remote": removed}))

    async def move(self, request: web.Request) -> web.Response:
        """Start a job that moves chunks into this replica."""
        call = await decode(request, wire.MoveRequest)
        seconds("pin_s", call.pin_s)
        seconds("stall_s", call.stall_s, least=_MIN_STALL_S)
        move = await self.move_jobs.begin(call, await self._some_keys_of(call))
        num_tokens = move.status().asked_chunks * self.identity.chunk_tokens
        return as_json(wire.MoveReply(event_id=move.event_id, num_tokens=num_tokens))

    async def move_status(self, request: web.Request) -> web.Response:
        """Report a move's progress when it has ended, or after ``wait_s``."""
        wait_s = seconds("wait_s", number(request, "wait_s", float))
        status = await self.move_jobs.status(
            request.match_info["event_id"], min(wait_s, MAX_WAIT_S)
        )
        if status is None:
            raise NotFoundError("this move is unknown, or ended too long ago")
        return as_json(status)

    # --- keys of the chunks that a call names ---

    async def _keys_of(self, call: wire.ChunkSelection) -> list[bytes]:
        """Return the engine's keys of the chunks that a call names.

        Raises `BadRequestError` unless it names them in exactly one way, and at most `MAX_CHUNKS`.
        """
        if (call.tokens is None) == (call.keys is None):
            raise BadRequestError("give either 'tokens' or 'keys', not both and not neither")
        if call.keys is not None:
            given = _digests(call.keys)
            return given if call.keys_are_stored else await self._stored(given, call.lora)
        tokens = call.tokens or []
        _check_count(len(tokens) // self.identity.chunk_tokens)
        extra, first = prompt_extra_keys(cache_salt=call.cache_salt, lora=call.lora)
        # A long prompt is hashed in a thread: other calls would wait for it.
        chain = await asyncio.to_thread(
            self._scheme.chain,
            *(tokens, self.identity.block_tokens),
            extra_keys=extra,
            first_extra_keys=first,
        )
        keys = chunk_keys(chain, self.identity.chunk_tokens // self.identity.block_tokens)
        return await self._stored(keys, call.lora)

    async def _stored(self, keys: list[bytes], lora: wire.Lora | None) -> list[bytes]:
        """Return the engine's keys for vLLM's keys."""
        # In a thread, because this reads the files of an adapter that vLLM has not loaded yet.
        version = await asyncio.to_thread(self.versions.of_name, lora) if lora else None
        version = version or self.versions.of_name(None)
        return [version.stored_key(key) for key in keys]

    async def _some_keys_of(self, call: wire.ChunkSelection) -> list[bytes]:
        """Return `_keys_of` without repeats; raise `BadRequestError` for keys of a wrong length."""
        keys = list(dict.fromkeys(await self._keys_of(call)))
        size = len(self._scheme.root)
        if any(len(key) != size for key in keys):
            raise BadRequestError(f"this replica's keys have {size} bytes; 'keys' has others")
        return keys


def _digests(keys: list[str]) -> list[bytes]:
    """Decode hexadecimal keys; raise `BadRequestError` if one is malformed, or for too many."""
    _check_count(len(keys))
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError:
        raise BadRequestError("'keys' must be digests in hex, two digits per byte") from None


def _check_count(chunks: int) -> None:
    if chunks > MAX_CHUNKS:
        raise BadRequestError(f"{chunks} chunks are too many; one call may name {MAX_CHUNKS}")
