"""Whether a replica's KV events come, and have the keys that the router computes.

They are followed by the router's own subscriber, and told to a fleet, which finds out the hash.
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
from router.doctor.http_probe import NoAnswerError, ask, in_words
from router.doctor.replica_checks import CheckContext, Examined, hash_in_words
from router.feeds import KvEndpoints, KvFeed, KvSubscriber, authorization
from router.fleet import Fleet, Replica
from router.index import (
    BlocksStored,
    KvBatch,
    KvEventFormatError,
    KvEventReader,
    PromptKeyCache,
    Tier,
)
from router.prompt import PromptSource
from warmroute_common.tasks import end_all

_CONNECT_S: Final = 2.0
_FOLLOW_S: Final = 6.0
"""Until all that can be replayed has been: longer than the subscriber waits for a silent replay."""
_REPLAY_S: Final = 3.0
_PROBE_ANSWER_S: Final = 60.0
_PROBE_EVENTS_S: Final = 5.0
_PROBE_BLOCKS: Final = 2
_USUAL_BLOCK_TOKENS: Final = 32
_MOST_KEYS: Final = 1_000_000
_ENABLE: Final = (
    'start vLLM with --kv-events-config \'{"enable_kv_cache_events": true, '
    '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)


class Watched:
    """What one replica's events have told so far; a `KvSink`."""

    def __init__(self, fleet: Fleet, replica: Replica, reader: KvEventReader) -> None:
        self._fleet = fleet
        self._replica = replica
        self._reader = reader
        self.stored: set[int] = set()
        """Keys of blocks that came to its GPU, up to `_MOST_KEYS`."""
        self.is_following = asyncio.Event()
        self._news = asyncio.Event()

    def following(self) -> None:
        """Note that what was published before has come, as far as it can."""
        self.is_following.set()

    def apply(self, batch: KvBatch) -> None:
        """Take a message."""
        self._fleet.apply_kv(self._replica.id, batch, asyncio.get_running_loop().time())
        self._reader.shows_first = not self._replica.shape_checked
        for event in batch.events:
            if isinstance(event, BlocksStored) and event.tier is Tier.GPU:
                # Of a busy replica the replay alone has many.
                self.stored.update(event.keys[: _MOST_KEYS - len(self.stored)])
        self._news.set()

    def forget(self) -> None:
        """Keep what was told: it is not used to route."""

    async def until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Return when messages have made something so, or after a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    self._news.clear()
                    await self._news.wait()


async def check_events(parts: CheckContext, seen: Examined, feed: KvFeed, *, probe: bool) -> None:
    """Follow a replica's events for a while; with ``probe`` send a prompt, and wait for its."""
    section = seen.section
    endpoints = await feed.endpoints()
    if endpoints is None:
        _tell_none(seen)
        return
    if (why := await _unreachable(endpoints.events)) is not None:
        fix = "is the port that of vLLM's --kv-events-config, and does a firewall let it through?"
        section.problem("kv-events", f"its KV events do not come: {why}", fix)
        return
    await _check_replay(section, endpoints)
    reader = KvEventReader()
    watched = Watched(parts.fleet, seen.replica, reader)
    subscriber = KvSubscriber(parts.context, endpoints, reader, watched, replay_timeout_s=_REPLAY_S)
    following = asyncio.create_task(subscriber.run())
    try:
        await _first_of(following, watched.is_following)
        if not watched.is_following.is_set():
            section.problem("kv-events", _why_not(following, endpoints), _ENABLE)
            return
        section.ok("kv-events", f"its KV events are followed at {endpoints.events}")
        if probe and parts.prompts is not None and seen.models:
            await _probe(parts.session, seen, parts.prompts, watched)
        _tell_keys(seen, probed=probe)
    finally:
        await end_all([following])


def _tell_none(seen: Examined) -> None:
    if seen.version is None and seen.config.agent_url is None:
        found = "publishes no KV events: what it holds is guessed from what it was sent"
        seen.section.note("kv-events", found)
        return
    fix = "restart it with 'warmroute replica', which has vLLM publish them"
    if seen.config.agent_url is None:
        fix = _ENABLE
    found = "publishes no KV events, so that what its GPU holds is only guessed"
    seen.section.problem("kv-events", found, fix)


async def _check_replay(section: Section, endpoints: KvEndpoints) -> None:
    fix = "add replay_endpoint to vLLM's --kv-events-config, or correct kv_replay"
    if endpoints.replay is None:
        found = "repeats no KV events: what was published before the router starts is not known"
        section.note("kv-replay", found, fix)
    elif (why := await _unreachable(endpoints.replay)) is not None:
        section.problem("kv-replay", f"its KV events cannot be repeated: {why}", fix)


async def _unreachable(endpoint: str) -> str | None:
    """Return why nothing can be had from an endpoint; None where something listens."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return None
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return f"{endpoint} takes no connection within {_CONNECT_S:g} s"
    except OSError as error:
        return in_words(error, endpoint)
    writer.close()
    return None


async def _first_of(following: asyncio.Task[None], followed: asyncio.Event) -> None:
    """Return when events are followed, when that has failed, or when it takes too long."""
    waiting = asyncio.create_task(followed.wait())
    await asyncio.wait([following, waiting], timeout=_FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
    await end_all([waiting])


def _why_not(following: asyncio.Task[None], endpoints: KvEndpoints) -> str:
    error = following.exception() if following.done() else None
    if isinstance(error, KvEventFormatError):
        return f"what comes from {endpoints.events} is not vLLM's KV events ({error})"
    if error is not None:
        return f"its KV events cannot be followed at {endpoints.events} ({error})"
    return f"{endpoints.events} is open, and is no publisher of KV events"


def _tell_keys(seen: Examined, *, probed: bool) -> None:
    section, replica = seen.section, seen.replica
    if replica.shape_problem is not None:
        section.problem("hash", replica.shape_problem)
    elif not replica.shape_checked:
        if not probed:
            found = "no KV event has shown its hash yet"
            section.note("hash", found, "find out with --probe, which sends it a short prompt")
    elif replica.shape is not None and (scheme := replica.shape.scheme) is not None:
        section.ok("hash", f"its KV's keys are {hash_in_words(scheme.algorithm, scheme.seed)}")
        info, told = seen.info, seen.config.hash_seed
        if info is not None and (info.hash_algorithm, info.hash_seed) != (
            scheme.algorithm,
            scheme.seed,
        ):
            found = (
                f"its agent says {hash_in_words(info.hash_algorithm, info.hash_seed)}, "
                "and its events have other keys"
            )
            section.problem("hash", found, "restart it: agent and vLLM are not of one start")
        if told is not None and told != scheme.seed:
            found = f"hash_seed is '{told}' in the file, and its keys have '{scheme.seed}'"
            section.problem("hash-seed", found, "correct it there, or take it out")


# --- the probe


async def _probe(
    session: aiohttp.ClientSession,
    seen: Examined,
    prompts: PromptSource,
    watched: Watched,
) -> None:
    """Send a prompt that no cache has, and see that its blocks' events come."""
    section, replica = seen.section, seen.replica
    block_tokens = replica.shape.block_tokens if replica.shape else _USUAL_BLOCK_TOKENS
    text = _unseen_text(max(block_tokens, _USUAL_BLOCK_TOKENS) * _PROBE_BLOCKS)
    body = {"model": seen.models[0], "prompt": text, "max_tokens": 1, "temperature": 0}
    watched.stored.clear()
    if (why := await _send(session, seen, body)) is not None:
        section.problem("probe", f"a prompt of {len(text)} characters {why}")
        return
    # The first blocks show how a stock vLLM makes its keys: until then none can be computed.
    await watched.until(lambda: bool(watched.stored) and replica.shape_checked, _PROBE_EVENTS_S)
    prompt = await prompts.reader_for(seen.models[0]).read("/v1/completions", body)
    keys = PromptKeyCache(prompt).of(replica.key_shape, replica.adapters)
    wanted = set(keys.keys) if keys.chain else set()
    await watched.until(lambda: wanted <= watched.stored, _PROBE_EVENTS_S)
    came = len(watched.stored)
    if not came:
        fix = "is prefix caching on, and enable_kv_cache_events set?"
        section.problem("probe", "it answered a prompt, and no KV event came", fix)
    elif not wanted:
        found = f"a prompt's {came} blocks came as KV events; their keys cannot be checked"
        section.note("probe", found, "see what is said of its tokens and its hash")
    elif wanted <= watched.stored:
        section.ok("probe", f"a prompt's {len(wanted)} blocks came, with the keys computed here")
    else:
        found = f"a prompt was answered, and {came} blocks came with other keys than computed here"
        section.problem("probe", found, "see what is said of its tokens and its hash")


def _unseen_text(tokens: int) -> str:
    """Return random text of at least this many tokens, which no cache has."""
    return " ".join(secrets.token_hex(4) for _ in range(tokens))


async def _send(
    session: aiohttp.ClientSession, seen: Examined, body: dict[str, object]
) -> str | None:
    """Send a completion; return what went wrong."""
    headers = {**authorization(seen.config), "Content-Type": "application/json"}
    url = f"{seen.config.url}/v1/completions"
    sent = orjson.dumps(body)
    try:
        told = await ask(
            session, "POST", url, headers=headers, body=sent, timeout_s=_PROBE_ANSWER_S
        )
    except NoAnswerError as error:
        return f"is not answered ({error})"
    if told.status == 200:
        return None
    return f"is answered with {told.status}: {told.body[:200].decode(errors='replace')}"
