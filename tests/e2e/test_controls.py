"""LMCache's documented sequence, with two real replicas: look up, move, pin, clear KV by hand.

Word for word as LMCache's documentation has it, but for the ports: so its
programs find here what they know.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.replica.text import real_text
from bench.replica.tiers import call, wait_until
from tests.e2e.conftest import Fleet
from tests.e2e.serving import CHUNK_TOKENS, MODEL, Answer, Replica, Router

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ONE, TWO = "lmcache_instance_1", "lmcache_instance_2"
CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"

# Five chunks and a tail shorter than a block, so that the GPU tier and the
# others hold the same tokens of it.
PROMPT_TOKENS = 5 * CHUNK_TOKENS + 40
HIT_TOKENS = 5 * CHUNK_TOKENS

Post = Callable[[str, dict[str, Any]], Any]


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Iterator[Router]:
    """A router that knows where the replicas serve, and nothing of their agents."""
    replicas = [
        {"url": each.url, "instance_id": name}
        for each, name in zip(fleet.replicas, (ONE, TWO), strict=True)
    ]
    settings = {"replicas": replicas, "controller": fleet.controller}
    with fleet.make_router("router-with-controller", **settings) as made:
        yield made


@pytest.fixture
def controller(fleet: Fleet, router: Router) -> Post:
    """POST to the controller, once both replicas have registered there."""
    wait_until("both replicas registered", lambda: registered(fleet) == {ONE, TWO})

    def post(path: str, body: dict[str, Any]) -> Any:
        return call(f"http://localhost:{fleet.controller['port']}{path}", body)

    return post


def registered(fleet: Fleet) -> set[str]:
    """Return the names under which agents have registered."""
    answer = call(f"http://localhost:{fleet.controller['port']}/instances")
    return {each["registered_as"] for each in answer["instances"] if each["registered"]}


@pytest.fixture
def prompt(fleet: Fleet, request: pytest.FixtureRequest) -> str:
    """A text of its own for each test, of about `PROMPT_TOKENS` tokens."""
    seed = zlib.crc32(request.node.nodeid.encode())
    return fresh_text(fleet.replicas[0], seed)


def fresh_text(replica: Replica, seed: int) -> str:
    return real_text(PROMPT_TOKENS, seed=seed, count=lambda text: len(tokenize(replica, text)))


def tokenize(replica: Replica, prompt: str) -> list[int]:
    tokens: list[int] = call(f"{replica.url}/tokenize", {"model": MODEL, "prompt": prompt})[
        "tokens"
    ]
    return tokens


def warm_up(replica: Replica, prompt: str) -> tuple[list[int], Answer]:
    """Complete a prompt; return its tokens and the replica's own warm answer, once it is stored."""
    assert replica.ask(prompt).cached_tokens == 0
    tokens = tokenize(replica, prompt)
    replica.wait_stored(tokens)
    reference = replica.ask(prompt)
    assert reference.cached_tokens == HIT_TOKENS
    return tokens, reference


def move(controller: Post, tokens: list[int], **more: object) -> dict[str, Any]:
    """Move from the first to the second; return how it ended."""
    answer = controller(
        "/move",
        {"old_position": [ONE, CPU], "new_position": [TWO, CPU], "tokens": tokens, **more},
    )
    assert answer["num_tokens"] == HIT_TOKENS
    return finished(controller, answer["event_id"])


def finished(controller: Post, event_id: str) -> dict[str, Any]:
    """Ask until a move is over."""
    status: dict[str, Any] = {}

    def over() -> bool:
        status.update(controller("/check_finish", {"event_id": event_id}))
        return bool(status["status"] != "running")

    wait_until(f"{event_id} finished", over)
    return status


def layout(controller: Post, tokens: list[int]) -> dict[str, Any]:
    """Return who holds a prompt, in the shape of LMCache's page."""
    answer: dict[str, Any] = controller("/lookup", {"tokens": tokens})
    found: dict[str, Any] = answer["layout_info"]
    assert {name: answer[name] for name in found} == found
    return found


def test_lmcaches_documented_sequence(fleet: Fleet, controller: Post, prompt: str) -> None:
    one, two = fleet.replicas
    tokens, reference = warm_up(one, prompt)
    assert layout(controller, tokens) == {ONE: [CPU, HIT_TOKENS]}

    status = move(controller, tokens)

    assert (status["status"], status["arrived_tokens"]) == ("done", HIT_TOKENS)
    assert status["moved_bytes"] > 0
    assert layout(controller, tokens)[TWO] == [CPU, HIT_TOKENS]
    # On the second replica, which has never seen it, the prompt is warm.
    assert two.ask(prompt) == reference


def test_what_was_moved_is_no_longer_there_but_on_disk(
    fleet: Fleet, controller: Post, prompt: str
) -> None:
    one, _ = fleet.replicas
    tokens, reference = warm_up(one, prompt)
    move(controller, tokens)
    assert layout(controller, tokens) == {ONE: [DISK, HIT_TOKENS], TWO: [CPU, HIT_TOKENS]}
    one.empty_gpu()
    assert one.ask(prompt) == reference


def test_a_copy_leaves_the_source_as_it_was(fleet: Fleet, controller: Post, prompt: str) -> None:
    one, two = fleet.replicas
    tokens, reference = warm_up(one, prompt)
    assert move(controller, tokens, copy=True)["status"] == "done"
    assert layout(controller, tokens) == {ONE: [CPU, HIT_TOKENS], TWO: [CPU, HIT_TOKENS]}
    one.empty_gpu()
    assert two.ask(prompt) == one.ask(prompt) == reference


def test_moving_what_is_only_on_disk(fleet: Fleet, controller: Post, prompt: str) -> None:
    one, two = fleet.replicas
    tokens, reference = warm_up(one, prompt)
    one.leave_on_disk(tokens)
    answer = controller(
        "/move",
        {"old_position": [ONE, DISK], "new_position": [TWO, CPU], "tokens": tokens, "copy": True},
    )
    assert answer["num_tokens"] == HIT_TOKENS
    assert finished(controller, answer["event_id"])["status"] == "done"
    assert two.ask(prompt) == reference


def test_moving_what_nobody_holds(controller: Post, fleet: Fleet, prompt: str) -> None:
    tokens = tokenize(fleet.replicas[0], prompt)
    answer = controller(
        "/move", {"old_position": [ONE, CPU], "new_position": [TWO, CPU], "tokens": tokens}
    )
    assert answer["num_tokens"] == 0
    assert finished(controller, answer["event_id"])["status"] == "done"
    assert layout(controller, tokens) == {}


def test_pin_and_unpin(fleet: Fleet, controller: Post, prompt: str) -> None:
    tokens, _ = warm_up(fleet.replicas[0], prompt)
    body = {"tokens": tokens, "instance_id": ONE, "location": CPU}
    pinned = controller("/pin", body)
    assert pinned["num_tokens"] == HIT_TOKENS
    assert controller("/check_finish", {"event_id": pinned["event_id"]})["status"] == "done"
    assert controller("/unpin", body)["num_tokens"] == HIT_TOKENS
    assert controller("/unpin", body)["num_tokens"] == 0


def test_clear_by_tokens_and_location(fleet: Fleet, controller: Post, prompt: str) -> None:
    one, _ = fleet.replicas
    tokens, _ = warm_up(one, prompt)
    other_tokens, _ = warm_up(one, fresh_text(one, seed=1))

    cleared = controller("/clear", {"instance_id": ONE, "location": CPU, "tokens": tokens})
    assert cleared["success"] is True
    assert cleared["num_tokens"] == HIT_TOKENS
    assert layout(controller, tokens) == {ONE: [DISK, HIT_TOKENS]}
    assert layout(controller, other_tokens) == {ONE: [CPU, HIT_TOKENS]}

    cleared = controller("/clear", {"instance_id": ONE, "tokens": tokens})
    assert cleared["dropped_tokens"][DISK] == HIT_TOKENS
    assert layout(controller, tokens) == {}

    cleared = controller("/clear", {"instance_id": ONE, "locations": [CPU, DISK]})
    assert cleared["num_tokens"] >= 2 * HIT_TOKENS
    assert layout(controller, other_tokens) == {}


def test_health(controller: Post) -> None:
    assert controller("/health", {"instance_id": ONE})["error_codes"] == {"0": 0}
    with pytest.raises(OSError, match=f"no instance 'three'; known instances: .*{TWO}"):
        controller("/health", {"instance_id": "three"})


def test_replicas_register_again_when_the_controller_starts_anew(
    fleet: Fleet, router: Router, controller: Post, prompt: str
) -> None:
    tokens, _ = warm_up(fleet.replicas[0], prompt)
    router.stop()
    router.start()
    wait_until("both replicas registered again", lambda: registered(fleet) == {ONE, TWO})
    assert layout(controller, tokens) == {ONE: [CPU, HIT_TOKENS]}
