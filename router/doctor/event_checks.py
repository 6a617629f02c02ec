"""Checks of a replica's KV events: whether they arrive, and have the keys that the router computes.

The router's own subscriber follows them, and a `Fleet` derives the hash from them.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from router.doctor.findings import Section
from router.doctor.http_probe import ProbeError, send
from router.doctor.replica_checks import CheckContext, Examined, hash_in_words
from router.feeds.feeds import KvFeed
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber
from router.feeds.replica_answers import authorization, engines, fetch
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.kv_events import BlocksStored, KvBatch, KvEventFormatError, KvEventReader
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.prompt.prompt_source import PromptSource
from warmroute_common.command_line import counted
from warmroute_common.connection_errors import connection_problem
from warmroute_common.tasks import end_all

_CONNECT_S: Final = 2.0
_FOLLOW_S: Final = 6.0
"""Time to receive the replay: longer than the subscriber waits for one that does not answer."""
_REPLAY_S: Final = 3.0
_PROBE_ANSWER_S: Final = 60.0
_PROBE_EVENTS_S: Final = 5.0
_PROBE_BLOCKS: Final = 2
_USUAL_BLOCK_TOKENS: Final = 32
_MAX_KEYS: Final = 1_000_000
_SEE_TOKENS: Final = "see the findings on its tokens and its hash"
_ENABLE: Final = (
    'start vLLM with --kv-events-config \'{"enable_kv_cache_events": true, '
    '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)


class EventRecorder:
    """Applies a replica's events to the fleet and records their keys; a `KvSink`."""

    def __init__(self, fleet: Fleet, replica: Replica, reader: KvEventReader) -> None:
        self._fleet = fleet
        self._replica = replica
        self._reader = reader
        self.stored: set[int] = set()
        """Keys of the blocks stored in its GPU, up to `_MAX_KEYS`."""
        self.is_following = asyncio.Event()
        self._arrived = asyncio.Event()

    def following(self) -> None:
        """The replay is complete, as far as the replica still has the events."""
        self.is_following.set()

    def apply(self, batch: KvBatch) -> None:
        """Apply a message."""
        self._fleet.apply_kv(self._replica.id, batch, asyncio.get_running_loop().time())
        self._reader.shows_first = not self._replica.shape_checked
        for event in batch.events:
            if isinstance(event, BlocksStored) and event.tier is KvTier.GPU:
                # The replay of a busy replica has many.
                self.stored.update(event.keys[: _MAX_KEYS - len(self.stored)])
        self._arrived.set()

    def forget(self) -> None:
        """Do nothing: nothing is routed with these keys."""

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return once messages have made a condition true, or after a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._arrived.clear()
                    await self._arrived.wait()


async def check_events(parts: CheckContext, seen: Examined, feed: KvFeed, *, probe: bool) -> None:
    """Follow a replica's events for a while; with ``probe`` send a prompt and await its events."""
    section = seen.section
    endpoints = await feed.endpoints()
    await _check_ranks(parts, seen)
    if endpoints is None:
        _report_no_events(seen)
        return
    if (why := await _unreachable(endpoints.events)) is not None:
        fix = "use the port of vLLM's --kv-events-config, and check that no firewall blocks it"
        section.problem("kv-events", f"its KV events do not arrive: {why}", fix)
        return
    await _check_replay(section, endpoints)
    reader = KvEventReader()
    recorder = EventRecorder(parts.fleet, seen.replica, reader)
    subscriber = KvSubscriber(
        parts.receiver, endpoints, reader, recorder, replay_timeout_s=_REPLAY_S
    )
    following = asyncio.create_task(subscriber.run())
    try:
        await _until_followed(following, recorder.is_following)
        if not recorder.is_following.is_set():
            section.problem("kv-events", _why_not_followed(following, endpoints), _ENABLE)
            return
        section.ok("kv-events", f"its KV events are followed at {endpoints.events}")
        if probe and parts.prompts is not None and seen.models:
            await _probe(parts.session, seen, parts.prompts, recorder)
        _check_hash(seen, probed=probe)
    finally:
        await end_all([following])


async def _check_ranks(parts: CheckContext, seen: Examined) -> None:
    timeout_s = parts.config.timeouts.health_timeout_s
    metrics = await fetch(parts.session, seen.config, "/metrics", timeout_s=timeout_s)
    parts.fleet.set_ranks(seen.replica.id, engines((metrics or b"").decode(errors="replace")))
    if (why := seen.replica.events_fault()) is not None:
        seen.section.problem("ranks", why)


def _report_no_events(seen: Examined) -> None:
    if seen.version is None and seen.config.agent_url is None:
        found = "publishes no KV events: the router guesses its KV from the requests it was sent"
        seen.section.note("kv-events", found)
        return
    fix = "restart it with 'warmroute replica', which makes vLLM publish them"
    if seen.config.agent_url is None:
        fix = _ENABLE
    found = "publishes no KV events, so the router can only guess what its GPU holds"
    seen.section.problem("kv-events", found, fix)


async def _check_replay(section: Section, endpoints: KvEndpoints) -> None:
    fix = "add replay_endpoint to vLLM's --kv-events-config, or correct kv_replay"
    if endpoints.replay is None:
        found = "replays no KV events: the router misses those published before it starts"
        section.note("kv-replay", found, fix)
    elif (why := await _unreachable(endpoints.replay)) is not None:
        section.problem("kv-replay", f"its KV events cannot be replayed: {why}", fix)


async def _unreachable(endpoint: str) -> str | None:
    """Return why an endpoint cannot be connected to; None if it can, or if it is not TCP."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return None
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return f"{endpoint} accepts no connection within {_CONNECT_S:g} s"
    except OSError as error:
        return connection_problem(error, endpoint)
    writer.close()
    return None


async def _until_followed(following: asyncio.Task[None], followed: asyncio.Event) -> None:
    """Return once events are followed, following has failed, or it takes too long."""
    waiting = asyncio.create_task(followed.wait())
    await asyncio.wait([following, waiting], timeout=_FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
    await end_all([waiting])


def _why_not_followed(following: asyncio.Task[None], endpoints: KvEndpoints) -> str:
    error = following.exception() if following.done() else None
    if isinstance(error, KvEventFormatError):
        return f"the messages from {endpoints.events} are not vLLM's KV events ({error})"
    if error is not None:
        return f"its KV events cannot be followed at {endpoints.events} ({error})"
    return f"{endpoints.events} is open, but does not publish KV events"


def _check_hash(seen: Examined, *, probed: bool) -> None:
    section, replica = seen.section, seen.replica
    if replica.shape_problem is not None:
        section.problem("hash", replica.shape_problem)
    elif not replica.shape_checked:
        if not probed:
            found = "no KV event has shown its hash yet"
            section.note("hash", found, "add --probe, which sends it a short prompt")
    elif replica.shape is not None and (scheme := replica.shape.scheme) is not None:
        section.ok("hash", f"its KV keys are {hash_in_words(scheme.algorithm, scheme.seed)}")
        info, configured = seen.info, seen.config.hash_seed
        if info is not None and (info.hash_algorithm, info.hash_seed) != (
            scheme.algorithm,
            scheme.seed,
        ):
            found = (
                f"its agent says {hash_in_words(info.hash_algorithm, info.hash_seed)}, "
                "but the keys in its events differ"
            )
            section.problem(
                "hash", found, "restart it: its agent and its vLLM were not started together"
            )
        if configured is not None and configured != scheme.seed:
            found = f"hash_seed is '{configured}' in the file, but its keys use '{scheme.seed}'"
            section.problem("hash-seed", found, "correct hash_seed, or remove it")


# --- the probe


async def _probe(
    session: aiohttp.ClientSession,
    seen: Examined,
    prompts: PromptSource,
    recorder: EventRecorder,
) -> None:
    """Send a prompt that no cache has, and check the events of its blocks."""
    section, replica = seen.section, seen.replica
    block_tokens = replica.shape.block_tokens if replica.shape else _USUAL_BLOCK_TOKENS
    text = _unseen_text(max(block_tokens, _USUAL_BLOCK_TOKENS) * _PROBE_BLOCKS)
    body = {"model": seen.models[0], "prompt": text, "max_tokens": 1, "temperature": 0}
    recorder.stored.clear()
    if (why := await _complete(session, seen, body)) is not None:
        section.problem("probe", f"a prompt of {len(text)} characters {why}")
        return
    # The first blocks show how a stock vLLM makes its keys; until then none can be computed.
    await recorder.until(lambda: bool(recorder.stored) and replica.shape_checked, _PROBE_EVENTS_S)
    prompt = await prompts.reader_for(seen.models[0]).read("/v1/completions", body)
    keys = PromptKeyCache(prompt).of(replica.key_shape, replica.adapters)
    wanted = set(keys.keys) if keys.chain else set()
    blocks = counted(len(wanted), "block")
    await recorder.until(lambda: wanted <= recorder.stored, _PROBE_EVENTS_S)
    arrived = len(recorder.stored)
    if not arrived:
        fix = "enable prefix caching, and set enable_kv_cache_events in --kv-events-config"
        section.problem("probe", "it answered a prompt, but no KV event arrived", fix)
    elif not wanted:
        found = f"KV events of {counted(arrived, 'block')} arrived; their keys cannot be checked"
        section.note("probe", found, _SEE_TOKENS)
    elif wanted <= recorder.stored:
        section.ok("probe", f"KV events of {blocks} arrived, with the keys computed here")
    else:
        found = (
            f"it answered a prompt, but the KV events of {counted(arrived, 'block')} have other "
            "keys than computed here"
        )
        section.problem("probe", found, _SEE_TOKENS)


def _unseen_text(tokens: int) -> str:
    """Return random text of at least this many tokens, which no cache has."""
    return " ".join(secrets.token_hex(4) for _ in range(tokens))


async def _complete(
    session: aiohttp.ClientSession, seen: Examined, body: dict[str, object]
) -> str | None:
    """Request a completion; return what went wrong, or None."""
    headers = {**authorization(seen.config), "Content-Type": "application/json"}
    url = f"{seen.config.url}/v1/completions"
    encoded = orjson.dumps(body)
    try:
        answer = await send(
            session, "POST", url, headers=headers, body=encoded, timeout_s=_PROBE_ANSWER_S
        )
    except ProbeError as error:
        return f"was not answered ({error})"
    if answer.status == 200:
        return None
    return f"was answered with {answer.status}: {answer.body[:200].decode(errors='replace')}"
