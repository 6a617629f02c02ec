"""Whom an agent answers, and from whom it takes chunks: the fleet, and nobody uninvited."""

import asyncio
import gc
import io
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cacheengine.agent import agent_handlers as handlers
from cacheengine.agent import agent_requests as answers
from cacheengine.agent import move_jobs as moving
from cacheengine.agent import peers as calling
from cacheengine.agent.peers import AgentHttpClient
from cacheengine.record import TransferMeter
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, layout
from tests.cacheengine.transfer.conftest import Play, play
from tests.cacheengine.whole_replica import WholeReplica, identity
from warmroute_common import agent_protocol as wire
from warmroute_common.api_errors import OverloadedError
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.keys import HashScheme, chunk_keys

TOKENS = list(range(256 * 4))
PREFIX = chunk_keys(HashScheme("sha256", "seed").chain(TOKENS, 16), 16)
SECRET = FleetSecret("known-to-the-fleet-alone")
EVIL = b"\x66" * CHUNK_BYTES
JSON = {"Content-Type": "application/json"}
POSTS = ("/lookup", "/prefetch", "/pin", "/unpin", "/clear", "/move")

__all__ = ["play"]


class Rig:
    """A replica that asks for the secret, one that does not, and calls to them."""

    def __init__(self, guarded: WholeReplica, loose: WholeReplica, session: aiohttp.ClientSession):
        self.guarded = guarded
        self.loose = loose
        self.session = session

    async def status(
        self, url: str, headers: dict[str, str], method: str = "POST", body: bytes = b"{}"
    ) -> tuple[int, str]:
        data = io.BytesIO(body) if method == "POST" else None
        async with self.session.request(method, url, data=data, headers=headers) as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def rig(make_bench: MakeBench) -> AsyncIterator[Rig]:
    made: list[tuple[str, Bench, FleetSecret | None]]
    made = [("guarded", make_bench(32), SECRET), ("loose", make_bench(32), None)]
    replicas = [await asyncio.to_thread(WholeReplica, *each) for each in made]
    async with aiohttp.ClientSession() as session:
        yield Rig(replicas[0], replicas[1], session)
    for each in replicas:
        await asyncio.to_thread(each.stop)


# --- the secret ---


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"Authorization": f"Bearer {SECRET.token[:-1]}"},
        {"Authorization": f"Basic {SECRET.token}"},
        {"Authorization": SECRET.token},
        {"Authorization": "Bearer \u00e9"},
        {"Authorization": f"Bearer {SECRET.key('transfer').hex()}"},
    ],
)
async def test_without_the_secret_nothing_is_told_or_done(rig: Rig, shown: dict[str, str]) -> None:
    rig.guarded.bench.store(PREFIX)
    calls = [("POST", each) for each in POSTS]
    calls += [("GET", each) for each in ("/info", "/snapshot", "/events", "/moves/x", "/none")]
    for method, path in calls:
        status, told = await rig.status(rig.guarded.url + path, JSON | shown, method)
        assert status == 401, path
        assert "this agent requires the fleet secret" in told
        assert "WARMROUTE_FLEET_SECRET" in told
    assert rig.guarded.bench.engine.match(PREFIX) == ["cpu"] * 4


@pytest.mark.parametrize("shown", [SECRET.token, "known-to-the-fleet-alone"])
async def test_who_knows_it_gets_in(rig: Rig, shown: str) -> None:
    rig.guarded.bench.store(PREFIX)
    headers = JSON | {"Authorization": f"Bearer {shown}"}
    assert (await rig.status(rig.guarded.url + "/clear", headers))[0] == 200
    assert rig.guarded.bench.engine.match(PREFIX) == []


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_and_prometheus_need_none(rig: Rig, path: str) -> None:
    assert (await rig.status(rig.guarded.url + path, {}, "GET"))[0] == 200


async def test_agents_show_it_to_each_other(rig: Rig, make_bench: MakeBench) -> None:
    other = await asyncio.to_thread(WholeReplica, "other", make_bench(32), SECRET)
    other.bench.store(PREFIX)
    source = {"agent_url": other.url, "transfer_address": other.address}
    ended = await move(rig, source, copy=False)
    assert (ended["state"], ended["arrived_chunks"], ended["error"]) == ("done", 4, "")
    assert rig.guarded.bench.has_right_bytes(PREFIX)
    assert other.bench.engine.match(PREFIX) == []
    await asyncio.to_thread(other.stop)


async def begin_move(rig: Rig, source: dict[str, str], *, copy: bool = True) -> tuple[int, str]:
    """Have the guarded replica fetch from a source; return its answer."""
    headers = JSON | {"Authorization": f"Bearer {SECRET.token}"}
    body = json.dumps({"source": source, "tokens": TOKENS, "copy": copy}).encode()
    return await rig.status(f"{rig.guarded.url}/move", headers, body=body)


async def move(rig: Rig, source: dict[str, str], *, copy: bool = True) -> Any:
    """Have the guarded replica fetch from a source; return how that ended."""
    headers = {"Authorization": f"Bearer {SECRET.token}"}
    status, told = await begin_move(rig, source, copy=copy)
    assert status == 200, told
    ended = f"{rig.guarded.url}/moves/{json.loads(told)['event_id']}?wait_s=20"
    return json.loads((await rig.status(ended, headers, "GET"))[1])


# --- a rogue source ---


class Rogue:
    """An agent and a transfer server of a stranger's, who knows all of the protocol."""

    def __init__(self, play: Play) -> None:
        self.host, self.port = play(self._serve)
        self.shown: list[str | None] = []

    def _serve(self, channel: Channel) -> None:
        hello = protocol.receive_hello(channel, layout().fingerprint(), SECRET)
        digests = protocol.welcome(channel, hello, None)
        if hello.message[-32:] != bytes(32):
            channel.receive(32)
        while (asked := protocol.receive_get(channel, hello.key_bytes)) is not None:
            for key in asked:
                protocol.send_chunk(channel, key, memoryview(EVIL), digests)

    def app(self) -> web.Application:
        async def info(request: web.Request) -> web.Response:
            self.shown.append(request.headers.get("Authorization"))
            tiers = {"cpu": wire.TierInfo(capacity_bytes=1, used_bytes=1)}
            named = msgspec.structs.replace(identity("rogue"), transfer_port=self.port)
            told = wire.InstanceInfo(
                **msgspec.structs.asdict(named),
                incarnation="rogue",
                tiers=tiers,
                layout=layout().fingerprint(),
            )
            return web.Response(body=msgspec.json.encode(told))

        async def lookup(request: web.Request) -> web.Response:
            reply = wire.LookupReply(matched_tokens=len(TOKENS), tokens_by_tier={}, tiers=[])
            return web.Response(body=msgspec.json.encode(reply))

        app = web.Application()
        app.add_routes([web.get("/info", info), web.post("/lookup", lookup)])
        return app


async def test_a_rogue_source_s_chunks_are_refused(rig: Rig, play: Play) -> None:
    """Even where somebody who knows the secret names it as a source. Nor is it shown the token."""
    rogue = Rogue(play)
    async with TestServer(rogue.app()) as server:
        url = str(server.make_url("")).rstrip("/")
        away = url.replace("127.0.0.1", "localhost")
        for agent_url, address, why in (
            (url, f"{rogue.host}:{rogue.port}", "the source does not know the fleet secret"),
            (away, rig.guarded.address, "must have the same host"),
            ("http://[", rig.guarded.address, "Invalid IPv6"),
        ):
            source = {"agent_url": agent_url, "transfer_address": address}
            status, told = await begin_move(rig, source)
            assert status in {400, 502}
            assert why in told
    assert rogue.shown == []
    assert rig.guarded.bench.engine.match(PREFIX) == []


async def test_a_source_s_proof_counts_for_a_short_time(
    rig: Rig, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more connection a copy, over which nothing else comes."""
    other = await asyncio.to_thread(WholeReplica, "other", make_bench(32), SECRET)
    other.bench.store(PREFIX)
    checked: list[str] = []
    check = moving.MoveJobs._check_is_of_fleet

    def count(jobs: moving.MoveJobs, source: wire.MoveSource, address: tuple[str, int]) -> None:
        checked.append(source.transfer_address)
        check(jobs, source, address)

    monkeypatch.setattr(moving.MoveJobs, "_check_is_of_fleet", count)
    monkeypatch.setattr(moving, "_MOST_PROVEN", 1)
    source = {"agent_url": other.url, "transfer_address": other.address}
    assert (await move(rig, source))["arrived_chunks"] == 4
    assert (await move(rig, source))["error"] == ""
    assert checked == [other.address]
    # Neither for another address of its host, nor for longer, nor of more than a bound.
    elsewhere = source | {"transfer_address": rig.loose.address}
    assert (await begin_move(rig, elsewhere))[0] == 400
    itself = {"agent_url": rig.guarded.url, "transfer_address": rig.guarded.address}
    await begin_move(rig, itself)
    await move(rig, source)
    monkeypatch.setattr(moving, "PROVEN_S", 0.0)
    await begin_move(rig, itself)
    await move(rig, source)
    await move(rig, source)
    by_address = {rig.loose.address: "loose", rig.guarded.address: "itself", other.address: "other"}
    expected = ["other", "loose", "itself", "other", "itself", "other", "other"]
    assert [by_address[each] for each in checked] == expected
    await asyncio.to_thread(other.stop)


async def test_a_stranger_cannot_have_it_fetch_at_all(rig: Rig, play: Play) -> None:
    rogue = Rogue(play)
    async with TestServer(rogue.app()) as server:
        url = str(server.make_url("")).rstrip("/")
        source = {"agent_url": url, "transfer_address": f"{rogue.host}:{rogue.port}"}
        body = json.dumps({"source": source, "tokens": TOKENS, "copy": True}).encode()
        guarded = await rig.status(f"{rig.guarded.url}/move", JSON, body=body)
        assert guarded[0] == 401
        assert rogue.shown == []
        # The attack works without the secret: a replica without one believes it.
        loose = await rig.status(f"{rig.loose.url}/move", JSON, body=body)
        assert loose[0] == 200
        ended = f"{rig.loose.url}/moves/{json.loads(loose[1])['event_id']}?wait_s=20"
        assert json.loads((await rig.status(ended, {}, "GET"))[1])["state"] == "done"
    (slot,) = rig.loose.bench.engine.hold(PREFIX[:1])
    assert bytes(rig.loose.bench.engine.view(slot)) == EVIL
    rig.loose.bench.engine.release(PREFIX[:1])


async def test_an_agent_follows_nobody_elsewhere(rig: Rig) -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"{rig.guarded.url}/info")

    app = web.Application()
    app.router.add_get("/info", elsewhere)
    async with TestServer(app) as server:
        caller = AgentHttpClient(rig.session, SECRET)
        with pytest.raises(calling.PeerRefusedError) as refused:
            await caller.call("GET", str(server.make_url("/info")))
    assert refused.value.http_status == 307


# --- web pages ---


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_what_a_form_can_send_is_not_taken(rig: Rig, kind: str | None) -> None:
    rig.loose.bench.store(PREFIX)
    for path in POSTS:
        headers = {} if kind is None else {"Content-Type": kind}
        status, told = await rig.status(rig.loose.url + path, headers)
        assert status == 415, path
        assert "send 'Content-Type: application/json'" in told
    assert rig.loose.bench.engine.match(PREFIX) == ["cpu"] * 4


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8090"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[oh"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
async def test_pages_of_other_sites_reach_no_agent(rig: Rig, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/clear"), ("GET", "/snapshot")):
        status, told = await rig.status(rig.loose.url + path, JSON | headers, method)
        assert status == 403, told
        assert "may come from a web page" in told


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8090"])
async def test_this_machine_s_own_names_are_taken(rig: Rig, host: str) -> None:
    assert (await rig.status(rig.loose.url + "/info", {"Host": host}, "GET"))[0] == 200


# --- bounds ---


@pytest.mark.parametrize("path", ["/lookup", "/prefetch", "/pin", "/unpin", "/clear"])
async def test_no_call_names_chunks_without_bound(rig: Rig, path: str) -> None:
    body = {"keys": [PREFIX[0].hex()] * (handlers.MAX_CHUNKS + 1)}
    status, told = await rig.status(rig.loose.url + path, JSON, body=json.dumps(body).encode())
    assert status == 400
    assert "65537 chunks are too many; one call may name 65536" in told


async def test_a_body_beyond_the_bound_is_refused(rig: Rig) -> None:
    body = b" " * (answers.MAX_BODY_BYTES + 1)
    assert (await rig.status(rig.loose.url + "/lookup", JSON, body=body))[0] == 413


async def test_bodies_together_are_bounded(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_BODIES_BYTES", 100)
    replica = await asyncio.to_thread(WholeReplica, "small", make_bench(2), None)
    url = urlsplit(replica.url)
    head = f"POST /lookup HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    held = head.encode() + b"Content-Length: 70\r\n\r\n" + b" " * 60
    try:
        async with aiohttp.ClientSession() as session:
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(held)
            while True:  # until the agent has read the first 60 bytes
                async with session.post(
                    replica.url + "/lookup", data=b" " * 60, headers=JSON
                ) as answer:
                    if answer.status == 503:
                        assert "the memory for request bodies is full" in await answer.text()
                        break
            writer.write(b" " * 10)
            writer.close()
            body = b'{"keys": ["' + PREFIX[0].hex().encode() + b'"]}'
            while True:  # until the agent has released them
                async with session.post(replica.url + "/lookup", data=body, headers=JSON) as answer:
                    if answer.status == 200:
                        break
    finally:
        await asyncio.to_thread(replica.stop)


async def test_a_peer_s_answer_is_read_up_to_a_bound(rig: Rig) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with pytest.raises(ConnectionError):
            while sent < 10 * calling.MAX_ANSWER_BYTES:
                await response.write(bytes(1 << 16))
                sent += 1 << 16
        return response

    app = web.Application()
    app.router.add_get("/info", endless)
    async with TestServer(app) as server:
        with pytest.raises(answers.PeerError, match="its answer has more than 4194304 bytes"):
            await AgentHttpClient(rig.session, None).call("GET", str(server.make_url("/info")))
    assert sent < 10 * calling.MAX_ANSWER_BYTES


async def test_of_moves_that_are_over_only_their_end_is_kept(
    rig: Rig, make_bench: MakeBench
) -> None:
    """A thousand are remembered; each may have named a million tokens."""
    other = await asyncio.to_thread(WholeReplica, "other", make_bench(32), None)
    other.bench.store(PREFIX)
    jobs = moving.MoveJobs(
        rig.loose.bench.engine,
        identity("loose"),
        AgentHttpClient(rig.session, None),
        TransferMeter(),
    )
    source = wire.MoveSource(agent_url=other.url, transfer_address=other.address)
    begun = await jobs.begin(wire.MoveRequest(source=source, tokens=TOKENS, copy=True), PREFIX)
    assert (begun.request.tokens, begun.status().asked_chunks) == (None, 4)
    await begun.ended.wait()
    ended = begun.status()
    assert (ended.state, ended.asked_chunks, ended.arrived_chunks) == ("done", 4, 4)
    assert (begun.keys, begun.fetch) == ([], None)
    assert await jobs.status(begun.event_id, 0.0) == ended
    del begun
    await asyncio.sleep(0)  # the task that ran it is let go of
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is moving.MoveJob]
    await jobs.stop()
    await asyncio.to_thread(other.stop)


async def test_chunks_of_all_moves_together_are_bounded(
    rig: Rig, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "MAX_CHUNKS", 7)
    other = await asyncio.to_thread(WholeReplica, "other", make_bench(32), None)
    other.bench.store(PREFIX)
    jobs = moving.MoveJobs(
        rig.loose.bench.engine,
        identity("loose"),
        AgentHttpClient(rig.session, None),
        TransferMeter(),
    )
    gate = asyncio.Event()

    async def waits(move: moving.MoveJob, address: tuple[str, int]) -> None:
        await gate.wait()

    monkeypatch.setattr(jobs, "_fetch", waits)
    source = wire.MoveSource(agent_url=other.url, transfer_address=other.address)
    wanted = wire.MoveRequest(source=source, tokens=[], copy=True)
    begun = await jobs.begin(wanted, PREFIX)
    with pytest.raises(OverloadedError, match="4 chunks are being moved; try again later"):
        await jobs.begin(wanted, PREFIX)
    gate.set()
    await begun.ended.wait()
    await jobs.stop()
    await asyncio.to_thread(other.stop)
