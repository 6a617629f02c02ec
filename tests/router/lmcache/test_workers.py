"""LMCache inside vLLM: its workers' messages over real ZeroMQ, through a whole router."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from router.config.settings import ControllerConfig, LmcacheWorkersConfig, ReplicaConfig
from router.index.lmcache_keys import LmcacheKeys
from router.index.prompt_keys import KvTier
from router.lmcache.worker_service import LmcacheWorkers
from router.membership.membership import Source
from tests.router.agent_server import serving
from tests.router.conftest import Fleet, Running, Wait
from tests.router.lmcache.helpers import CPU, DISK, FakeWorker, fake_worker, make_fleet
from warmroute_common.config_reader import ConfigError

CHUNK = 16
PROMPT = list(range(4 * CHUNK))
KEYS = [
    int.from_bytes(each, "big")
    for each in LmcacheKeys.inside(CHUNK, "sha256_cbor", None).chain(PROMPT)
]
FREE = LmcacheWorkersConfig(
    pull_port=0,
    reply_port=0,
    heartbeat_port=0,
    chunk_size=CHUNK,
    pre_caching_hash_algorithm="sha256_cbor",
)


@dataclass(kw_only=True)
class Rig:
    """A router before two upstreams, and its controller."""

    running: Running
    workers: LmcacheWorkers
    url: str
    client: aiohttp.ClientSession
    eventually: Wait
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def worker(self, instance_id: str = "two", worker_id: int = 0, **more: Any) -> FakeWorker:
        return await self.stack.enter_async_context(
            fake_worker(self.workers.ports.numbers, instance_id, worker_id, **more)
        )

    async def registered(self, *of: Any, **more: Any) -> FakeWorker:
        made = await self.worker(*of, **more)
        assert (await made.register())["type"] == "RegisterRetMsg"
        return made

    def held(self, replica: str = "two") -> dict[str, int]:
        fleet = self.running.parts.fleet
        counts = fleet.index.held(fleet.replicas[replica].slot)
        return {
            str(tier): count for tier, count in counts.items() if count and tier is not KvTier.GPU
        }

    async def counted(self, what: str, count: int = 1) -> None:
        counts = self.running.parts.lmcache.counts
        await self.eventually(lambda: counts[f"worker_{what}"] >= count)
        assert counts[f"worker_{what}"] == count

    async def ask(self, prompt: Sequence[int] = PROMPT) -> aiohttp.ClientResponse:
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        async with self.client.post(f"{self.running.url}/v1/completions", json=body) as response:
            await response.read()
            return response

    async def call(self, path: str, body: object = None) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        async with self.client.request(method, f"{self.url}{path}", json=body) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: object = None) -> Any:
        status, answer = await self.call(path, body)
        assert status == 200, answer
        return answer


@pytest.fixture
def settings() -> LmcacheWorkersConfig:
    return FREE


@pytest.fixture
async def rig(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, settings: LmcacheWorkersConfig
) -> AsyncIterator[Rig]:
    running = await fleet.router(
        policy="ttft",
        controller=ControllerConfig(port=0, monitor_port=0),
        lmcache_workers=settings,
    )
    controller, workers = running.parts.controller, running.parts.lmcache.workers
    assert controller is not None and workers is not None
    async with serving(controller.api()) as url, AsyncExitStack() as stack:
        yield Rig(
            running=running,
            workers=workers,
            url=url,
            client=client,
            eventually=eventually,
            stack=stack,
        )


# --- what they hold


async def test_a_request_goes_where_lmcache_holds_its_prompt(rig: Rig) -> None:
    worker = await rig.registered()
    await worker.tell("admit", KEYS[:2])
    await worker.tell("admit", KEYS, DISK)
    await rig.counted("applied", 6)
    answer = await rig.ask()
    told = {name: answer.headers[f"x-warmroute-{name}"] for name in ("replica", "matched-cpu")}
    assert told == {"replica": "two", "matched-cpu": str(2 * CHUNK)}
    assert answer.headers["x-warmroute-matched-disk"] == str(2 * CHUNK)
    assert "x-warmroute-prefetch" not in answer.headers, "it takes none"
    async with rig.client.get(f"{rig.running.url}/metrics") as response:
        line = 'warmroute_prefetches_total{replica="two",result="impossible"} 1.0'
        assert line in await response.text()
    await worker.tell("evict", KEYS[:2])
    await worker.tell("evict", KEYS, DISK)
    await rig.counted("applied", 12)
    assert rig.held() == {}


async def test_signed_keys_and_unknown_locations_are_understood(rig: Rig) -> None:
    worker = await rig.registered()
    await worker.tell("admit", [KEYS[0] - (1 << 64)] if KEYS[0] >> 63 else [KEYS[0]])
    await worker.tell("admit", [-1, KEYS[1]], "SomeNewBackend")
    await rig.counted("applied", 3)
    assert rig.held() == {"cpu": 1, "remote": 2}
    answer = await rig.ok("/lookup", {"tokens": PROMPT})
    assert answer["layout_info"] == {"two": ["RemoteBackend", 2 * CHUNK]}


async def test_what_is_late_unknown_or_malformed_changes_nothing_and_is_counted(rig: Rig) -> None:
    worker = await rig.registered()
    stranger = await rig.worker("three")
    await worker.tell("admit", KEYS)
    await rig.counted("applied", 4)
    late = {"op_type": "evict", "key": KEYS[0], "seq_num": 0}
    await worker.push("BatchedKVOperationMsg", location=CPU, operations=[late])
    await rig.counted("late")
    await stranger.tell("admit", KEYS)
    await rig.counted("unknown")
    await worker.push("FullSyncBatchMsg", location=CPU, sync_id="s", batch_id=0, keys=[1])
    await rig.counted("late", 2)
    for frame in (b"", b"\xc1", b'{"type": "KVAdmitMsg"}'):
        await worker.push_socket.send(frame)
    await worker.push("BatchedKVOperationMsg", location=CPU, operations=[{"key": "x"}])
    await rig.counted("malformed", 4)
    assert (await worker.ask("RegisterMsg", ip="no host", port=1))["type"] == "ErrorMsg"
    assert (await worker.ask("NoSuchMsg"))["type"] == "ErrorMsg"
    await rig.counted("malformed", 6)
    assert rig.held() == {"cpu": 4}
    assert len(rig.workers.registry) == 1


async def test_after_a_gap_all_keys_are_asked_for_and_followed_to_their_end(rig: Rig) -> None:
    worker = await rig.registered()
    assert (await worker.beat())["commands"] == []
    await worker.tell("admit", KEYS[:1])
    await worker.tell("admit", KEYS[1:2], skipped=1)
    await rig.counted("gaps")
    (command,) = (await worker.beat())["commands"]
    assert (command["command_type"], command["reason"]) == ("full_sync", "messages were missed")
    assert (await worker.beat())["commands"] == [], "not again at once: it stores nothing meanwhile"
    sync = {"sync_id": "s1", "location": CPU}
    start = await worker.ask("FullSyncStartMsg", **sync, total_keys=3, batch_count=2)
    assert (start["accepted"], rig.held()) == (True, {})
    await worker.push("FullSyncBatchMsg", **sync, batch_id=1, keys=KEYS[3:])
    await worker.push("FullSyncEndMsg", **sync, actual_total_keys=3)
    await rig.eventually(lambda: rig.held() == {"cpu": 1})
    status = await worker.ask("FullSyncStatusMsg", sync_id="s1")
    while not status["missing_batches"]:
        status = await worker.ask("FullSyncStatusMsg", sync_id="s1")
    assert (status["missing_batches"], status["can_exit_freeze"]) == ([0], False)
    await worker.push("FullSyncBatchMsg", **sync, batch_id=0, keys=KEYS[:2])
    await rig.counted("synced")
    status = await worker.ask("FullSyncStatusMsg", sync_id="s1")
    assert (status["is_complete"], status["can_exit_freeze"]) == (True, True)
    assert rig.held() == {"cpu": 3}


async def test_workers_are_inside_of_a_replica_that_joins_by_their_name(rig: Rig) -> None:
    """Nothing is known of what they hold: they are asked for it."""
    worker = await rig.registered()
    await worker.tell("admit", KEYS)
    await rig.counted("applied", 4)
    before = rig.running.parts.fleet.replicas["two"]
    one = rig.running.parts.fleet.replicas["one"].config
    members = rig.running.parts.members
    members.name(Source.FILE, [one])
    await rig.eventually(lambda: before.is_removed)
    assert rig.workers.registry.replica_of("two") == "one", "the only one on its host now"
    members.name(Source.FILE, [one, before.config])
    await rig.eventually(lambda: rig.workers.registry.replica_of("two") == "two")
    (command,) = (await worker.beat())["commands"]
    assert command["command_type"] == "full_sync"
    await worker.tell("admit", KEYS[:1])
    await rig.eventually(lambda: rig.held() == {"cpu": 1})


async def test_a_gap_on_disk_forgets_the_disk(rig: Rig) -> None:
    """LMCache 0.5 sends the keys of CPU RAM alone: what is missed elsewhere comes no more."""
    worker = await rig.registered()
    await worker.tell("admit", KEYS)
    await worker.tell("admit", KEYS[:3], DISK)
    await worker.tell("admit", KEYS[3:], DISK, skipped=1)
    await rig.counted("gaps")
    assert rig.held() == {"cpu": 4, "disk": 1}
    assert (await worker.beat())["commands"] == []


async def test_a_worker_that_has_restarted_holds_nothing(rig: Rig) -> None:
    worker = await rig.registered()
    await worker.tell("admit", KEYS)
    await worker.tell("admit", KEYS, DISK)
    await rig.counted("applied", 8)
    await worker.register()
    assert rig.held() == {}
    worker.numbers.clear()
    await worker.tell("admit", KEYS[:2])
    await rig.counted("applied", 10)
    assert rig.held() == {"cpu": 2}


async def test_a_heartbeat_makes_a_worker_known_to_a_router_that_has_restarted(rig: Rig) -> None:
    worker = await rig.worker()
    await worker.tell("admit", KEYS[:1])
    await rig.counted("unknown")
    url = f"127.0.0.1:{rig.workers.ports.numbers['heartbeat_port']}"
    (command,) = (await worker.beat(url))["commands"]
    assert command["reason"] == "the controller has restarted"
    old = await worker.ask("FullSyncStatusMsg", sync_id="of-before")
    assert (old["is_complete"], old["can_exit_freeze"]) == (False, True), "it is not kept frozen"
    await worker.tell("admit", KEYS[1:2])
    await rig.counted("applied")
    assert rig.running.parts.lmcache.counts["worker_gaps"] == 0


async def test_only_worker_0_of_an_instance_is_followed(rig: Rig) -> None:
    first, second = await rig.registered(), await rig.registered("two", 1)
    await second.tell("admit", KEYS)
    await rig.counted("applied", 4)
    assert rig.held() == {}
    await first.tell("admit", KEYS)
    await rig.counted("applied", 8)
    assert rig.held() == {"cpu": 4}
    await second.push("DeRegisterMsg", ip="127.0.0.1", port=1)
    await rig.eventually(lambda: len(rig.workers.registry) == 1)
    assert rig.held() == {"cpu": 4}
    await first.push("DeRegisterMsg", ip="127.0.0.1", port=1)
    await rig.eventually(lambda: not len(rig.workers.registry))
    assert rig.held() == {}


async def test_a_peer_that_holds_the_chunks_is_named_to_p2p_lookups(rig: Rig) -> None:
    one = await rig.registered("one", peer_init_url="10.0.0.1:7600")
    two = await rig.registered("two", peer_init_url="10.0.0.2:7600")
    await two.tell("admit", KEYS[:3])
    await rig.counted("applied", 3)
    found = await one.ask("BatchedP2PLookupMsg", hashes=KEYS)
    assert found["layout_info"] == [["two", CPU, 3, "10.0.0.2:7600"]]
    own = await two.ask("BatchedP2PLookupMsg", hashes=KEYS)
    assert own["layout_info"] == [["", "", 0, ""]]


# --- who they are


@pytest.mark.parametrize("settings", [replace(FREE, timeout_s=0.4)])
async def test_a_silent_worker_is_forgotten_and_one_without_heartbeats_is_probed(
    rig: Rig,
) -> None:
    beating, quiet = await rig.registered("one"), await rig.registered("two")
    await beating.beat()
    await quiet.tell("admit", KEYS)
    await rig.counted("applied", 4)
    await rig.counted("silent")
    assert [each.registration.instance_id for each in rig.workers.registry.all()] == ["two"]
    assert rig.held() == {"cpu": 4}, "its port takes connections, so it lives"
    assert quiet.serving is not None
    quiet.serving.cancel()
    quiet.context.destroy(linger=0)
    await rig.counted("silent", 2)
    assert rig.held() == {}


async def test_an_instance_without_a_replica_is_reported_by_name(rig: Rig) -> None:
    worker = await rig.registered("lmcache-7")
    await worker.tell("admit", KEYS)
    await rig.counted("applied", 4)
    (told,) = (await rig.ok("/instances"))["instances"]
    assert (told["instance_id"], told["replica"]) == ("lmcache-7", None)
    assert "one, two are all at 127.0.0.1; write 'instance_id: lmcache-7'" in told["problem"]
    answer = await rig.ok("/lookup", {"tokens": PROMPT})
    assert (answer["layout_info"], answer["errors"]) == ({}, {"lmcache-7": told["problem"]})


async def test_one_of_each_on_a_host_belong_together(rig: Rig) -> None:
    """The second replica is another instance's by its name."""
    await rig.registered("one")
    other = await rig.registered("lmcache-7")
    await other.tell("admit", KEYS)
    await rig.counted("applied", 4)
    assert rig.held("two") == {"cpu": 4}


@pytest.mark.parametrize(
    "settings",
    [replace(FREE, pre_caching_hash_algorithm="builtin")],
)
async def test_keys_that_cannot_be_computed_are_reported(rig: Rig) -> None:
    worker = await rig.registered()
    await worker.tell("admit", KEYS)
    await rig.counted("applied", 4)
    (told,) = (await rig.ok("/instances"))["instances"]
    assert "PYTHONHASHSEED=0" in told["problem"]
    assert rig.held() == {}


async def test_keys_that_match_no_prompt_are_reported(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another hash, seed or chunk size nothing would ever match, and nothing else say so."""
    worker = await rig.registered()
    for first in range(20):
        assert (await rig.ask([first, *PROMPT])).status == 200
    await worker.tell("admit", range(200))
    await rig.counted("applied", 200)
    assert "none begins a prompt that was sent there" in caplog.text
    assert (await rig.ok("/instances"))["instances"][0]["keys"] == "differ"
    await rig.ask()
    await worker.tell("admit", KEYS)
    await rig.counted("applied", 204)
    assert (await rig.ok("/instances"))["instances"][0]["keys"] == "seen"


async def test_two_instances_of_one_name_are_reported_and_not_asked_alternately(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time that a worker sends all its keys it stores nothing for seconds."""
    first, second = await rig.registered(), await rig.registered()
    asked = [(await each.beat())["commands"] for each in (first, second, first, second)]
    assert len([each for each in asked if each]) == 1
    assert "two instances must not have one lmcache_instance_id" in caplog.text


async def test_the_name_of_a_replica_with_an_agent_is_refused(fleet: Fleet) -> None:
    running = await fleet.router(
        replicas=(
            ReplicaConfig(url=fleet.one.url, instance_id="one", agent_url="http://127.0.0.1:1"),
        ),
        lmcache_workers=FREE,
    )
    workers = running.parts.lmcache.workers
    assert workers is not None
    async with fake_worker(workers.ports.numbers, "one") as worker:
        answer = await worker.register()
    assert "'one' is a replica with an agent_url" in answer["error"]
    assert running.parts.lmcache.counts["worker_refused"] == 1


async def test_a_port_in_use_is_reported_by_its_key(rig: Rig) -> None:
    taken = rig.workers.ports.numbers["reply_port"]
    fleet = make_fleet()
    again = LmcacheWorkers(fleet, LmcacheWorkersConfig(pull_port=0, reply_port=taken), Counter())
    with pytest.raises(ConfigError, match=rf"reply_port: cannot listen at 127.0.0.1:{taken} "):
        again.listen()
    assert all(each.closed for each in again._context._sockets)


# --- the controller's API


async def test_the_controllers_calls_reach_every_worker(rig: Rig) -> None:
    first, second = await rig.registered(), await rig.registered("two", 1)
    for worker, tokens in ((first, 64), (second, 48)):
        worker.answers["ClearWorkerMsg"] = {"type": "ClearWorkerRetMsg", "num_tokens": tokens}
    await first.tell("admit", KEYS[:3])
    await rig.counted("applied", 3)

    assert (await rig.ok("/lookup", {"tokens": PROMPT}))["two"] == [CPU, 3 * CHUNK]
    cleared = await rig.ok("/clear", _TWO)
    assert cleared["dropped_tokens"] == {CPU: 48}
    assert (await rig.ok("/check_finish", {"event_id": cleared["event_id"]}))["status"] == "done"
    for worker in (first, second):
        (call,) = worker.called
        assert (call["type"], call["location"]) == ("ClearWorkerMsg", CPU)
    assert (await rig.ok("/health"))["instances"] == 1
    second.answers["ClearWorkerMsg"] = {"type": "ErrorMsg", "error": "out of order"}
    status, answer = await rig.call("/clear", _TWO)
    assert (status, answer["error"]["message"]) == (502, "worker 1 of 'two': out of order")


async def test_a_move_is_done_by_the_worker_that_holds_the_chunks(rig: Rig) -> None:
    one = await rig.registered("one", peer_init_url="10.0.0.1:7600")
    await rig.registered("two", peer_init_url="10.0.0.2:7600")
    one.answers["MoveWorkerMsg"] = {"type": "MoveWorkerRetMsg", "num_tokens": 64}
    body = {"old_position": ["one", DISK], "new_position": ["two", CPU], "tokens": PROMPT}
    moved = await rig.ok("/move", {**body, "copy": True})
    assert moved["num_tokens"] == 64
    (call,) = one.called
    assert (call["old_position"], call["new_position"]) == (DISK, ["10.0.0.2:7600", CPU])
    assert (call["tokens"], call["copy"]) == (PROMPT, True)


_TWO = {"instance_id": "two", "location": CPU}
_FROM, _TO = {"old_position": ["two", DISK]}, {"new_position": ["one", CPU]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/pin", {**_TWO, "tokens": PROMPT}, "is not asked to pin"),
        ("/unpin", {**_TWO, "tokens": PROMPT}, "is not asked to unpin"),
        ("/health", {"instance_id": "two"}, "is not asked for its health"),
        ("/clear", {**_TWO, "tokens": PROMPT}, "clears whole locations"),
        ("/clear", {"instance_id": "two"}, f"clears {CPU} alone"),
        ("/clear", {"instance_id": "two", "location": DISK}, f"clears {CPU} alone"),
        (
            "/move",
            {**_FROM, "new_position": ["two", CPU], "tokens": PROMPT},
            "moves nothing between one instance's own locations",
        ),
        (
            "/move",
            {**_FROM, **_TO, "tokens": PROMPT, "cache_salt": "s"},
            "does not separate prompts by cache_salt",
        ),
        (
            "/move",
            {**_FROM, "new_position": ["one", DISK], "tokens": PROMPT},
            f"moves chunks to {CPU} alone",
        ),
        (
            "/move",
            {**_FROM, **_TO, "tokens": PROMPT},
            "moves chunks over P2P alone: set enable_p2p at 'two'",
        ),
    ],
)
async def test_calls_that_lmcache_inside_vllm_does_not_get_are_refused_by_name(
    rig: Rig, path: str, body: dict[str, Any], said: str
) -> None:
    worker, _ = await rig.registered(), await rig.registered("one", peer_init_url="10.0.0.1:1")
    status, answer = await rig.call(path, body)
    assert (status, answer["error"]["code"]) == (409, "unsupported")
    assert f"LMCache 0.5 inside vLLM {said}" in answer["error"]["message"]
    assert worker.called == []


async def test_a_worker_that_does_not_answer_times_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.registered()
    worker.answers["ClearWorkerMsg"] = None
    monkeypatch.setattr("router.lmcache.worker_control.ANSWER_S", 0.1)
    status, answer = await rig.call("/clear", _TWO)
    assert status == 504
    assert "worker 0 of 'two' has not answered within 0.1 s" in answer["error"]["message"]
    sockets = [each for each in rig.workers._context._sockets if not each.closed]
    assert len(sockets) == 3, "the ports'"


async def test_instances_of_two_kinds_move_nothing_to_each_other(rig: Rig) -> None:
    await rig.registered()
    body = {"old_position": ["two", CPU], "new_position": ["three", CPU], "tokens": PROMPT}
    status, answer = await rig.call("/move", body)
    assert status == 404
    assert "'three' has no LMCache inside" in answer["error"]["message"]
