"""Two real replicas behind a real router: who gets a request, and what survives a kill."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import openai
import pytest

from bench.replica.tiers import call, wait_until
from tests.e2e.conftest import Fleet
from tests.e2e.serving import (
    CHUNK_TOKENS,
    MODEL,
    Replica,
    Router,
    fresh_prompt,
    prometheus,
    wait_no_shared_memory,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Iterator[Router]:
    """A router in front of both replicas, which it knows to be up."""
    with fleet.make_router("router") as made:
        yield made


@pytest.fixture(scope="module")
def uncopied(fleet: Fleet) -> Iterator[Router]:
    """A router that copies nothing.

    A toy model's KV is copied faster than two replicas' times per token differ on a busy machine,
    so that with copies the other replica may be the better one.
    """
    with fleet.make_router("router-without-prefetch", prefetch={"enabled": False}) as made:
        yield made


def client_of(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=300)


class Served:
    """One streamed completion through the router."""

    def __init__(self, router: Router, prompt: list[int], **more: str) -> None:
        with (
            client_of(router) as client,
            client.completions.with_streaming_response.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=2,
                temperature=0,
                stream=True,
                extra_headers=more or None,
            ) as response,
        ):
            self.headers = response.headers
            self.text = response.read().decode()
        assert self.text.rstrip().endswith("data: [DONE]"), self.text[-500:]

    @property
    def replica(self) -> str:
        return str(self.headers["x-warmroute-replica"])

    def matched(self, tier: str) -> int:
        return int(self.headers[f"x-warmroute-matched-{tier}"])


def whole_answer(
    router: Router, prompt: list[int], *, max_tokens: int, **headers: str
) -> Mapping[str, str]:
    """Complete a prompt without streaming, and return the answer's headers."""
    with client_of(router) as client:
        response = client.completions.with_raw_response.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_headers=headers,
            extra_body={"ignore_eos": True},
        )
    headers_of_answer: Mapping[str, str] = response.headers
    return headers_of_answer


@contextmanager
def killed(replica: Replica) -> Iterator[None]:
    """Kill a replica of the session, and start it again for the tests that follow."""
    replica.kill()
    try:
        yield
    finally:
        replica.start()
        replica.wait_ready()


def matched_at(router: Router, replica: Replica, prompt: list[int]) -> dict[str, int]:
    """Return what the router believes that a replica holds of a prompt."""
    answer = call(f"{router.url}/explain", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
    for candidate in answer["candidates"]:
        if candidate["replica_id"] == replica.name:
            matched: dict[str, int] = candidate["matched_tokens"]
            return matched
    return {}


def holds(router: Router, replica: Replica, prompt: list[int], count: int) -> bool:
    """Whether the router believes that a replica holds this many tokens of a prompt."""
    return sum(matched_at(router, replica, prompt).values()) >= count


def wait_known(router: Router, replica: Replica, prompt: list[int], **tokens: int) -> None:
    """Wait until the router believes that a replica holds this many tokens of a prompt in tiers."""
    wait_until(
        f"the router knows that {replica.name} holds {tokens}",
        lambda: matched_at(router, replica, prompt).items() >= tokens.items(),
    )


def warm_one(
    fleet: Fleet, router: Router, prompt: list[int], **headers: str
) -> tuple[Replica, Replica]:
    """Send a prompt once; return the replica that holds it now, and the other."""
    served = Served(router, prompt, **headers)
    holder, other = fleet.replicas
    if served.replica != holder.name:
        holder, other = other, holder
    holder.wait_stored(prompt)
    return holder, other


def test_the_openai_client_is_served_and_told_why(fleet: Fleet, router: Router) -> None:
    with client_of(router) as client:
        response = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello."}], max_tokens=4
        )
        models = client.models.list()
    assert response.parse().choices[0].message.content is not None
    assert response.headers["x-warmroute-replica"] in {each.name for each in fleet.replicas}
    assert response.headers["x-warmroute-reason"]
    assert [model.id for model in models] == [MODEL]


def test_the_same_prompt_goes_to_the_replica_that_holds_it(fleet: Fleet, uncopied: Router) -> None:
    for seed in range(50, 54):
        prompt = fresh_prompt(1100, seed=seed)
        holder, _ = warm_one(fleet, uncopied, prompt)
        wait_known(uncopied, holder, prompt, gpu=1024)
        again = Served(uncopied, prompt)
        assert again.replica == holder.name
        assert again.headers["x-warmroute-reason"] == "longest-match"
        assert again.matched("gpu") + again.matched("cpu") >= 1024


def test_a_session_stays_at_home(uncopied: Router) -> None:
    # So long that home is the fastest, even if the machine has slowed it more than the other.
    prompt = fresh_prompt(2400, seed=60)
    first = Served(uncopied, prompt, **{"x-session-id": "chat-1"})
    for length in (100, 200):
        longer = prompt + fresh_prompt(length, seed=61)
        served = Served(uncopied, longer, **{"x-session-id": "chat-1"})
        assert served.replica == first.replica
        assert served.headers["x-warmroute-reason"] == "session-home"


@pytest.mark.parametrize(("stop", "go"), [("sleep?level=1", "wake_up"), ("pause", "resume")])
def test_a_replica_that_stands_still_gets_nothing_until_it_goes_on(
    fleet: Fleet, router: Router, stop: str, go: str
) -> None:
    """Its /health answers, and requests there hang without end."""

    def state(replica: Replica) -> str:
        told = call(f"{router.url}/replicas")
        return str(next(each["state"] for each in told if each["id"] == replica.name))

    prompt = fresh_prompt(600, seed=len(stop))
    holder, other = warm_one(fleet, router, prompt)
    call(f"{holder.url}/{stop}", {})
    try:
        wait_until(f"the router knows of the {stop}", lambda: state(holder) == "down")
        assert {Served(router, prompt).replica for _ in range(3)} == {other.name}
    finally:
        call(f"{holder.url}/{go}", {})
    wait_until(f"the router knows of the {go}", lambda: state(holder) == "up")
    assert Served(router, fresh_prompt(300, seed=len(go))).replica


def test_disk_kv_is_prefetched_before_the_request_is_forwarded(fleet: Fleet) -> None:
    prompt = fresh_prompt(5 * CHUNK_TOKENS + 20, seed=70)
    with fleet.make_router("router-by-match", policy="longest-prefix") as by_match:
        holder, _ = warm_one(fleet, by_match, prompt)
        holder.empty_gpu()
        holder.empty_cpu()
        wait_known(by_match, holder, prompt, disk=5 * CHUNK_TOKENS)
        served = Served(by_match, prompt)
        assert served.replica == holder.name
        assert served.matched("disk") == 5 * CHUNK_TOKENS
        assert served.headers["x-warmroute-prefetch"].startswith("asked=5;promoted=5")
        metrics = prometheus(f"{by_match.url}/metrics")
        counted = f'warmroute_prefetch_chunks_total{{replica="{holder.name}",result="promoted"}}'
        assert metrics[counted] >= 5


def test_a_router_that_starts_anew_still_finds_the_warm_replica(
    fleet: Fleet, router: Router
) -> None:
    """By the match alone: how fast a toy model's replicas are on a busy machine says nothing."""
    prompts = [fresh_prompt(1100, seed=80 + i) for i in range(3)]
    holders = [warm_one(fleet, router, prompt)[0] for prompt in prompts]
    with fleet.make_router("router-restarted", policy="longest-prefix") as another:
        for prompt, holder in zip(prompts, holders, strict=True):
            wait_until(
                f"the new router knows what {holder.name} holds",
                partial(holds, another, holder, prompt, 1024),
            )
            told = call(f"{another.url}/explain", {"model": MODEL, "prompt": prompt})
            assert (told["replica"], told["reason"]) == (holder.name, "longest-match")
        served = Served(another, prompts[0])
        assert served.replica == holders[0].name
        assert served.matched("gpu") + served.matched("cpu") >= 1024


def test_without_agents_vllms_own_events_are_enough(fleet: Fleet) -> None:
    """As with a stock vLLM: the router finds the event stream and the hash scheme by itself."""
    urls = [{"url": each.url, "instance_id": each.name} for each in fleet.replicas]
    with fleet.make_router("router-without-agents", replicas=urls) as humble:
        prompt = fresh_prompt(1100, seed=85)
        first = Served(humble, prompt)
        wait_until(
            "the router has understood the events",
            lambda: any(
                matched_at(humble, each, prompt).get("gpu") == 1024 for each in fleet.replicas
            ),
        )
        again = Served(humble, prompt)
        assert again.replica == first.replica
        assert again.headers["x-warmroute-reason"] == "longest-match"
        assert "x-warmroute-prefetch" not in again.headers


def test_without_anything_a_replica_still_serves(fleet: Fleet, router: Router) -> None:
    """A router whose only replica is another router: no agent, no events of its own."""
    behind = [{"url": router.url, "instance_id": "plain"}]
    with fleet.make_router("router-of-a-router", replicas=behind) as plain:
        served = Served(plain, fresh_prompt(300, seed=86))
        assert served.replica == "plain"


@pytest.fixture
def sessions_router(fleet: Fleet) -> Iterator[Router]:
    """A router that keeps sessions at home whatever the replicas' speeds."""
    with fleet.make_router("router-sessions", policy="session") as made:
        yield made


def test_kill_restart_and_what_the_disk_remembers(fleet: Fleet, sessions_router: Router) -> None:
    router = sessions_router
    prompt = fresh_prompt(5 * CHUNK_TOKENS + 20, seed=90)
    session = {"x-session-id": "chat-2"}
    holder, other = warm_one(fleet, router, prompt, **session)

    # A request whose replica dies before the first byte: the answer is long, and not streamed.
    assert holder.vllm_metric("vllm:num_requests_running") == 0
    results: list[Mapping[str, str]] = []
    sender = threading.Thread(
        target=lambda: results.append(whole_answer(router, prompt, max_tokens=800, **session))
    )
    sender.start()
    wait_until("it runs", lambda: holder.vllm_metric("vllm:num_requests_running") == 1)
    with killed(holder):
        sender.join(timeout=120)
        assert [headers["x-warmroute-replica"] for headers in results] == [other.name]
        assert results[0]["x-warmroute-retries"] == "1"

        # The next request for what the dead one held is answered by the other.
        assert Served(router, prompt).replica == other.name

    # It comes back with its disk tier, and nobody tells the router.
    wait_known(router, holder, prompt, disk=5 * CHUNK_TOKENS)
    assert holder.tiers_of(prompt) == ["disk"] * 5
    before = other.ask(prompt)
    answer = holder.ask(prompt)
    assert answer.cached_tokens == before.cached_tokens == 5 * CHUNK_TOKENS
    assert answer == before


def test_a_killed_replica_leaves_no_shared_memory(fleet: Fleet) -> None:
    wait_no_shared_memory()
