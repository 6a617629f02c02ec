"""LMCache's ``/move`` and ``/check_finish`` against scripted agents, over HTTP."""

import pytest

from router.lmcache.controller_api import MAX_EVENTS
from router.lmcache.instance_registry import ConfiguredInstance
from tests.router.lmcache.helpers import CHUNK_TOKENS, TOKENS, Controlled, FakeAgent, move
from warmroute_common import agent_protocol as wire

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"

pytestmark = pytest.mark.usefixtures("urls")


async def test_move_has_the_destination_fetch(
    control: Controlled, one: FakeAgent, two: FakeAgent, urls: list[str]
) -> None:
    answer = await control.ok("/move", move(new_position=["two", DISK], cache_salt="s"))
    assert answer["num_tokens"] == 3 * CHUNK_TOKENS
    assert answer["event_id"].startswith("Move")
    assert one.asked == []
    assert two.asked == [
        (
            "/move",
            wire.MoveRequest(
                source=wire.MoveSource(
                    agent_url=urls[0], transfer_address="127.0.0.1:7777", tier="cpu"
                ),
                tier="disk",
                tokens=TOKENS,
                cache_salt="s",
                copy=False,
            ),
        )
    ]


@pytest.mark.parametrize("far", ["http://10.1.2.3:8102", "http://[fd00::2]:8102"])
async def test_a_source_that_only_this_machine_reaches_is_not_named_to_another(
    control: Controlled, two: FakeAgent, urls: list[str], far: str
) -> None:
    """What listens at that address over there could be the destination itself."""
    control.configured[1] = ConfiguredInstance(id="two", agent_url=far, incarnation=None)
    status, answer = await control.post("/move", move())
    assert status == 409
    assert f"two, at {far}, cannot reach one at {urls[0]}" in answer["error"]["message"]
    assert answer["error"]["param"] == "old_position"


async def test_move_between_tiers_of_one_instance(
    control: Controlled, one: FakeAgent, urls: list[str]
) -> None:
    one.info["transfer_port"] = None
    await control.ok("/move", move(old_position=["one", DISK], new_position=["one", CPU]))
    ((_, asked),) = one.asked
    assert isinstance(asked, wire.MoveRequest)
    assert asked.source == wire.MoveSource(agent_url=urls[0], transfer_address="", tier="disk")
    assert asked.tier == "cpu"


async def test_move_can_copy(control: Controlled, two: FakeAgent) -> None:
    await control.ok("/move", move(copy=True))
    await control.ok("/move", move(copy=None))
    assert [asked.copy for _, asked in two.asked if isinstance(asked, wire.MoveRequest)] == [
        True,
        False,
    ]


async def test_check_finish_follows_a_move(control: Controlled, two: FakeAgent) -> None:
    event = {"event_id": (await control.ok("/move", move()))["event_id"]}
    running = await control.ok("/check_finish", event)
    assert running == {
        "status": "running",
        "num_tokens": 3 * CHUNK_TOKENS,
        "arrived_tokens": CHUNK_TOKENS,
        "moved_bytes": 10,
    }
    two.end_moves("done")
    done = await control.ok("/check_finish", event)
    assert (done["status"], done["arrived_tokens"], done["moved_bytes"]) == ("done", 192, 30)
    # It is remembered, even if the agent forgets it.
    two.moves.clear()
    assert await control.ok("/check_finish", event) == done


async def test_check_finish_reports_what_arrived_of_a_move_that_failed(
    control: Controlled, two: FakeAgent
) -> None:
    event = {"event_id": (await control.ok("/move", move()))["event_id"]}
    two.end_moves("failed", arrived=2, error="one has gone")
    answer = await control.ok("/check_finish", event)
    assert (answer["status"], answer["arrived_tokens"]) == ("failed", 2 * CHUNK_TOKENS)
    assert answer["error"] == "one has gone"


async def test_check_finish_of_a_move_whose_agent_restarted(
    control: Controlled, two: FakeAgent
) -> None:
    event = {"event_id": (await control.ok("/move", move()))["event_id"]}
    two.moves.clear()
    answer = await control.ok("/check_finish", event)
    assert answer["status"] == "not_found"
    assert answer["error"] == "two does not know the move: it has restarted since"


async def test_check_finish_of_a_move_whose_agent_does_not_answer(
    control: Controlled, two: FakeAgent
) -> None:
    event = {"event_id": (await control.ok("/move", move()))["event_id"]}
    two.failure = 500
    status, answer = await control.post("/check_finish", event)
    assert status == 502
    assert "two: " in answer["error"]["message"]
    two.failure = None
    assert (await control.ok("/check_finish", event))["status"] == "running"


async def test_check_finish_of_what_was_done_at_once(control: Controlled) -> None:
    pin = {"tokens": TOKENS, "instance_id": "one", "location": CPU}
    event_id = (await control.ok("/pin", pin))["event_id"]
    answer = await control.ok("/check_finish", {"event_id": event_id})
    assert answer == {"status": "done", "num_tokens": 0}


async def test_check_finish_of_an_unknown_event(control: Controlled) -> None:
    answer = await control.ok("/check_finish", {"event_id": "none"})
    assert answer == {
        "status": "not_found",
        "error": f"the event is unknown, or older than the latest {MAX_EVENTS}",
    }


async def test_only_the_latest_events_are_kept(
    control: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.lmcache.controller_api.MAX_EVENTS", 3)
    pin = {"tokens": TOKENS, "instance_id": "one", "location": CPU}
    ids = [(await control.ok("/pin", pin))["event_id"] for _ in range(4)]
    assert len(set(ids)) == 4 and all(each.startswith("Pin") for each in ids)
    answers = [await control.ok("/check_finish", {"event_id": each}) for each in ids]
    assert [each["status"] for each in answers] == ["not_found", "done", "done", "done"]


async def test_instances_that_differ_cannot_exchange_chunks(
    control: Controlled, two: FakeAgent
) -> None:
    two.info |= {"layout": "M", "hash_seed": "7", "chunk_tokens": 128}
    status, answer = await control.post("/move", move())
    assert status == 409
    message = answer["error"]["message"]
    assert "they differ in hash_seed" in message and "chunk_tokens 64 and 128" in message
    two.info |= {"hash_seed": "vllm-none-hash", "chunk_tokens": 64}
    _, answer = await control.post("/move", move())
    assert "differ in dtype, weights, parallel layout" in answer["error"]["message"]
    assert two.asked == []


async def test_a_source_without_a_transfer_port(control: Controlled, one: FakeAgent) -> None:
    one.info["transfer_port"] = None
    status, answer = await control.post("/move", move())
    assert status == 409
    assert answer["error"]["message"] == (
        "'one' does not send chunks: set distributed_url in its configuration"
    )
