"""Stock vLLM with stock LMCache servers behind the router: nothing of it is patched or mocked."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.lmcache.replica import CHUNK_TOKENS, LmcacheReplica
from bench.replica.tiers import metric, wait_until
from tests.lmcache.conftest import Stage
from tests.lmcache.helpers import TOKENS, ask, chat, next_turn, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.lmcache, pytest.mark.timeout(600)]

WHOLE = TOKENS // CHUNK_TOKENS * CHUNK_TOKENS


def stored(stage: Stage, holder: LmcacheReplica, body: dict[str, Any]) -> None:
    """Wait until the router was told that all of a prompt is on a server's disk."""
    tokens = body.get("prompt") or holder.chat_tokens(body["messages"][0]["content"])

    def is_on_disk() -> bool:
        found = stage.lookup(tokens)
        return bool(found) and all((holder.name, "l2") in each for each in found)

    wait_until(f"{holder.name}: the prompt is on disk", is_on_disk)


def leave_on_disk(stage: Stage, holder: LmcacheReplica, body: dict[str, Any]) -> None:
    stage.empty_gpus()
    holder.empty_l1()
    stage.wait_known(body, "disk", WHOLE)
    assert holder.l1_objects() == 0


@pytest.mark.parametrize("body", [prompt(1), chat(2)], ids=["tokens", "chat"])
def test_a_prompt_goes_where_it_is_in_whatever_tier(stage: Stage, body: dict[str, Any]) -> None:
    cold = ask(stage.router_url, body)
    holder = stage.replicas[cold.replica]
    stored(stage, holder, body)
    on_gpu = ask(stage.router_url, body)
    assert (on_gpu.replica, on_gpu.matched("gpu") > WHOLE // 2) == (cold.replica, True)

    stage.empty_gpus()
    stage.wait_known(body, "cpu", WHOLE // 2)
    in_l1 = ask(stage.router_url, body)
    assert in_l1.replica == cold.replica
    assert in_l1.matched("cpu") > WHOLE // 2

    stage.empty_gpus()
    holder.empty_l1()
    stage.wait_known(body, "disk", WHOLE // 2)
    chunks = holder.l1_objects()
    assert chunks == 0
    in_l2 = ask(stage.router_url, body)
    assert in_l2.replica == cold.replica
    assert in_l2.asked_and_missing == (in_l2.matched("disk") // CHUNK_TOKENS, 0)
    # For the same matched length: of another the sums are rounded otherwise.
    assert in_l1.text == in_l2.text


def test_a_chats_second_turn_finds_the_first_after_the_gpu_was_emptied(stage: Stage) -> None:
    first = chat(3)
    cold = ask(stage.router_url, first)
    second = next_turn(first, cold.text)
    stage.empty_gpus()
    stage.wait_known(second, "cpu", WHOLE // 2)
    warm = ask(stage.router_url, second)
    assert warm.replica == cold.replica
    assert warm.matched("cpu") > WHOLE // 2


def test_a_prefetch_has_l2_in_l1_before_the_request_arrives(stage: Stage) -> None:
    """LMCache's own status says so, while vLLM is stopped and cannot have looked anything up."""
    body = prompt(4)
    holder = stage.replicas[ask(stage.router_url, body).replica]
    stored(stage, holder, body)
    leave_on_disk(stage, holder, body)
    with ThreadPoolExecutor(1) as thread:
        with holder.stopped_vllm():
            warm = thread.submit(ask, stage.router_url, body)
            wait_until("L2 is in L1", lambda: holder.l1_objects() == WHOLE // CHUNK_TOKENS)
            assert not warm.done()
        assert warm.result().asked_and_missing == (WHOLE // CHUNK_TOKENS, 0)


def test_the_router_takes_the_speeds_that_a_server_has_measured(stage: Stage) -> None:
    body = prompt(9)
    holder = stage.replicas[ask(stage.router_url, body).replica]
    stored(stage, holder, body)

    def is_measured_after_a_load_from_disk() -> bool:
        leave_on_disk(stage, holder, body)
        ask(stage.router_url, body)
        name = "warmroute_measured_rate"
        return all(
            metric(stage.router_url, name, part=part, replica=holder.name)
            for part in ("load", "disk")
        )

    # A speed needs a load between two readings, which are ten seconds apart.
    wait_until("the speeds are measured", is_measured_after_a_load_from_disk)


def test_a_restarted_router_learns_all_tiers_anew(stage: Stage) -> None:
    in_l1, in_l2 = prompt(5), prompt(6)
    first = ask(stage.router_url, in_l2)
    stored(stage, stage.replicas[first.replica], in_l2)
    leave_on_disk(stage, stage.replicas[first.replica], in_l2)
    second = ask(stage.router_url, in_l1)
    wait_until(
        "it is stored",
        lambda: stage.replicas[second.replica].l1_objects() >= WHOLE // CHUNK_TOKENS,
    )
    stage.empty_gpus()
    stage.restart_router()
    for cold, body in ((first, in_l2), (second, in_l1)):
        warm = ask(stage.router_url, body)
        assert warm.replica == cold.replica
        assert warm.matched("cpu") == WHOLE, "asked, it brings up what lies on disk"


def test_a_server_that_is_killed_costs_a_cold_answer_elsewhere(stage: Stage) -> None:
    """And is known again, with what lies on its disk, once it is back."""
    body = prompt(7)
    cold = ask(stage.router_url, body)
    holder = stage.replicas[cold.replica]
    stored(stage, holder, body)
    stage.empty_gpus()
    stage.wait_known(body, "cpu", WHOLE)
    holder.kill_server()
    elsewhere = ask(stage.router_url, body)
    assert elsewhere.replica != cold.replica
    assert elsewhere.seconds < 2 * cold.seconds + 2, "vLLM itself hangs for 20 seconds there"
    time.sleep(
        22
    )  # until vLLM notices; if the server is back before that, vLLM does not use it again
    holder.start_server()
    holder.wait_noticed()
    on_disk = {
        each["replica_id"]: each["matched_tokens"].get("disk", 0)
        for each in stage.explain(body)["candidates"]
    }
    assert on_disk[holder.name] == WHOLE
