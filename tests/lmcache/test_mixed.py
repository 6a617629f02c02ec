"""One router before three real vLLMs: one with our engine, one with stock LMCache, one with
neither, which tells its KV events alone. Whatever its kind, a chat goes where its KV is.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.lmcache.environment import is_installed, python
from bench.lmcache.replica import CHUNK_TOKENS, LmcacheReplica, OurReplica, start_together
from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    ROUTER_READY_TIMEOUT_S,
    platform_arguments,
    replica_environment,
    router_command,
)
from bench.replica.model import make_model
from bench.replica.tiers import Vllm, call, wait_until
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from tests.lmcache.helpers import MODEL, ask, chat, next_turn

pytestmark = [pytest.mark.vllm, pytest.mark.lmcache, pytest.mark.timeout(600)]

LEAST_TOKENS = 2_000
"""So much of a chat's first turn is matched at least: all but a chunk, of a third more."""
MAX_MODEL_TOKENS = 8192
OURS, LMCACHE, PLAIN = "ours", "lmcache", "plain"


class PlainVllm(Vllm):
    """A stock vLLM with KV events on, and nothing else."""

    def __init__(self, group: ProcessGroup, model: str, directory: Path, *, of: int) -> None:
        port, events_port, replay_port = free_ports(3)
        super().__init__(name=PLAIN, url=f"http://127.0.0.1:{port}", model=MODEL)
        self._group, self._log = group, directory / f"{PLAIN}.log"
        self._environment = replica_environment("cpu", 0, of=of)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(MAX_MODEL_TOKENS), *platform_arguments("cpu", of=of)),
            *("--kv-events-config", json.dumps(events)),
        ]

    @property
    def entry(self) -> dict[str, str]:
        return {"url": self.url, "instance_id": self.name}

    def start(self) -> None:
        self._group.start(self.name, self._command, self._environment, self._log)

    def wait_ready(self) -> None:
        self._group.wait_ready(self.name, f"{self.url}/health", REPLICA_READY_TIMEOUT_S)


@dataclass
class Mixed:
    """What runs."""

    router_url: str
    ours: OurReplica
    lmcache: LmcacheReplica
    plain: PlainVllm

    @property
    def replicas(self) -> tuple[OurReplica, LmcacheReplica, PlainVllm]:
        return (self.ours, self.lmcache, self.plain)

    def replica(self, name: str) -> OurReplica | LmcacheReplica | PlainVllm:
        return next(each for each in self.replicas if each.name == name)

    def held(self, body: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Return what the router knows each replica to hold of a prompt, by tier."""
        candidates = call(f"{self.router_url}/explain", {"model": MODEL} | body)["candidates"]
        return {
            each["replica_id"]: {
                tier: tokens for tier, tokens in each["matched_tokens"].items() if tokens
            }
            for each in candidates
        }

    def wait_held(self, body: dict[str, Any], **tiers: str | None) -> None:
        """Wait until the router knows each replica to hold a prompt in one tier, or not at all."""

        def is_so() -> bool:
            held = self.held(body)
            return all(
                list(held[name]) == ([tier] if tier else [])
                and (tier is None or held[name][tier] >= LEAST_TOKENS)
                for name, tier in tiers.items()
            )

        try:
            wait_until(f"{tiers}", is_so, timeout_s=30)
        except Exception as error:
            raise AssertionError(f"{error}; held: {self.held(body)}") from error

    def learn(self, name: str, body: dict[str, Any]) -> str:
        """Have a replica compute a prompt, behind the router's back; return its answer."""
        replica = self.replica(name)
        text = ask(replica.url, body).text
        if not isinstance(replica, PlainVllm):
            replica.wait_stored(_tokens(replica, body))
        return text


def _tokens(replica: Vllm, body: dict[str, Any]) -> list[int]:
    (message,) = body["messages"]
    return replica.chat_tokens(message["content"])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    if not is_installed():
        pytest.skip("LMCache's environment is not there: make test-lmcache installs it")
    directory = tmp_path_factory.mktemp("mixed")
    model = str(make_model(directory / "model"))
    port, controller_port, monitor_port = free_ports(3)
    with ProcessGroup() as group:
        kind: dict[str, Any] = {
            "model": model,
            "served_name": MODEL,
            "directory": directory,
            "index": 0,
            "of": 3,
            "max_model_tokens": MAX_MODEL_TOKENS,
        }
        lmcache = LmcacheReplica(
            group,
            LMCACHE,
            python=python(),
            coordinator_url=f"http://127.0.0.1:{controller_port}",
            **kind,
        )
        made = Mixed(
            f"http://127.0.0.1:{port}",
            OurReplica(group, OURS, **kind),
            lmcache,
            PlainVllm(group, model, directory, of=3),
        )
        settings = {
            "port": port,
            "tokenizer": {"path": model},
            "replicas": [each.entry for each in made.replicas],
            "controller": {"port": controller_port, "monitor_port": monitor_port},
        }
        config = directory / "router.yaml"
        config.write_text(json.dumps(settings))  # JSON is YAML
        try:
            start_together(made.replicas)
            group.start("router", router_command(config), None, directory / "router.log")
            health = f"{made.router_url}/health"
            group.wait_ready("router", health, ROUTER_READY_TIMEOUT_S)

            def all_up() -> bool:
                states = call(health)["replicas"].values()
                return all(each["state"] == "up" for each in states)

            wait_until("all replicas are up", all_up)
            yield made
        finally:
            group.stop_all()
            made.lmcache.tidy()


@pytest.mark.parametrize(("seed", "name"), [(1, OURS), (2, LMCACHE), (3, PLAIN)])
def test_a_second_turn_goes_where_the_first_is_on_the_gpu(
    mixed: Mixed, seed: int, name: str
) -> None:
    first = chat(seed)
    second = next_turn(first, mixed.learn(name, first))
    others = {each: None for each in (OURS, LMCACHE, PLAIN) if each != name}
    wait_until(
        f"{name}: known on the GPU",
        lambda: mixed.held(second)[name].get("gpu", 0) >= LEAST_TOKENS,
    )
    mixed.wait_held(second, **others)
    reply = ask(mixed.router_url, second)
    assert reply.replica == name
    assert reply.matched("gpu") >= LEAST_TOKENS


@pytest.mark.parametrize(("seed", "name"), [(11, OURS), (12, LMCACHE)])
def test_a_second_turn_goes_where_the_first_is_in_a_lower_tier(
    mixed: Mixed, seed: int, name: str
) -> None:
    first = chat(seed)
    second = next_turn(first, mixed.learn(name, first))
    replica = mixed.replica(name)
    assert isinstance(replica, OurReplica | LmcacheReplica)
    replica.empty_gpu()
    mixed.wait_held(second, **{name: "cpu"})
    in_ram = ask(mixed.router_url, second)
    assert (in_ram.replica, in_ram.matched("cpu") >= LEAST_TOKENS) == (name, True)

    replica.empty_gpu()
    replica.leave_on_disk(_tokens(replica, first))
    mixed.wait_held(second, **{name: "disk"})
    on_disk = ask(mixed.router_url, second)
    assert (on_disk.replica, on_disk.matched("disk") >= LEAST_TOKENS) == (name, True)
    assert on_disk.asked_and_missing == (on_disk.matched("disk") // CHUNK_TOKENS, 0)
    assert on_disk.text == in_ram.text


def test_one_decision_weighs_all_three(mixed: Mixed) -> None:
    """One prompt: on a GPU without an engine, in our CPU RAM, and on LMCache's disk."""
    first = chat(21)
    for name in (OURS, LMCACHE, PLAIN):
        mixed.learn(name, first)
    mixed.ours.empty_gpu()
    mixed.lmcache.empty_gpu()
    mixed.lmcache.leave_on_disk(_tokens(mixed.lmcache, first))
    mixed.wait_held(first, ours="cpu", lmcache="disk", plain="gpu")

    mixed.plain.empty_gpu()
    mixed.ours.empty_gpu()
    call(f"{mixed.ours.agent_url}/clear", {"tiers": ["cpu", "disk"]})
    mixed.wait_held(first, ours=None, lmcache="disk", plain=None)
    reply = ask(mixed.router_url, first)
    assert reply.replica == LMCACHE
    assert reply.asked_and_missing == (reply.matched("disk") // CHUNK_TOKENS, 0)
