"""Two stock vLLM replicas, each with a stock LMCache server, and a router that stands in as
their coordinator: started once for all tests here, which takes most of their time.
"""

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.lmcache.environment import is_installed, python
from bench.lmcache.replica import LmcacheReplica, start_together
from bench.replica.local import ROUTER_READY_TIMEOUT_S, router_command
from bench.replica.model import make_model
from bench.replica.tiers import call, wait_until
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from tests.lmcache.helpers import MODEL

SECRET = "s3cret"


@dataclass
class Stage:
    """What runs."""

    group: ProcessGroup
    replicas: dict[str, LmcacheReplica]
    router_url: str
    controller_url: str
    start_router: Callable[[], None]

    def restart_router(self) -> None:
        """Kill the router and start it again."""
        self.group.stop("router", kill=True)
        self.start_router()

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the router thinks of a request."""
        answer: dict[str, Any] = call(f"{self.router_url}/explain", {"model": MODEL} | body)
        return answer

    def lookup(self, tokens: list[int]) -> list[set[tuple[str, str]]]:
        """Return the servers and tiers of each chunk of a prompt, as LMCache's clients ask."""
        model = next(iter(self.replicas.values())).model_path
        body = {"token_ids": tokens, "model_name": model, "world_size": 1}
        request = urllib.request.Request(
            f"{self.controller_url}/directory/lookup",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {SECRET}"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            results = json.loads(response.read())["results"]
        return [{(at["instance_id"], at["tier"]) for at in each["placements"]} for each in results]

    def wait_known(self, body: dict[str, Any], tier: str, tokens: int) -> None:
        """Wait until the router knows ``tokens`` of a prompt in one tier, and in no other."""

        def is_known() -> bool:
            matched = self.explain(body)["matched_tokens"]
            found = {name: count for name, count in matched.items() if count}
            return list(found) == [tier] and found[tier] >= tokens

        wait_until(f"{tokens} tokens in {tier} alone", is_known, timeout_s=30)

    def empty_gpus(self) -> None:
        for each in self.replicas.values():
            each.empty_gpu()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if not is_installed():
        pytest.skip("LMCache's environment is not there: make test-lmcache installs it")
    directory = tmp_path_factory.mktemp("lmcache")
    model = str(make_model(directory / "model"))
    port, controller_port, monitor_port = free_ports(3)
    with ProcessGroup() as group:
        replicas = {
            name: LmcacheReplica(
                group,
                name,
                python=python(),
                model=model,
                served_name=MODEL,
                directory=directory,
                coordinator_url=f"http://any:{SECRET}@127.0.0.1:{controller_port}",
                index=index,
                of=2,
                max_model_tokens=8192,
            )
            for index, name in enumerate(("one", "two"))
        }
        settings = directory / "router.yaml"
        lines = [f"port: {port}", f"tokenizer: {{path: {model}}}", "replicas:"]
        lines += [
            f"  - {{url: '{each.url}', instance_id: {name}, lmcache: '{each.server_url}'}}"
            for name, each in replicas.items()
        ]
        ports = f"port: {controller_port}, monitor_port: {monitor_port}"
        lines += [f"controller: {{{ports}, secret: {SECRET}}}"]
        settings.write_text("\n".join(lines))
        made = Stage(
            group=group,
            replicas=replicas,
            router_url=f"http://127.0.0.1:{port}",
            controller_url=f"http://127.0.0.1:{controller_port}",
            start_router=lambda: _start_router(group, settings, port, directory),
        )
        try:
            start_together(list(replicas.values()))
            made.start_router()
            yield made
        finally:
            group.stop_all()
            for each in replicas.values():
                each.tidy()


def _start_router(group: ProcessGroup, settings: Path, port: int, directory: Path) -> None:
    group.start("router", router_command(settings), None, directory / "router.log")
    url = f"http://127.0.0.1:{port}"
    group.wait_ready("router", f"{url}/health", ROUTER_READY_TIMEOUT_S)

    def all_up() -> bool:
        states = call(f"{url}/health")["replicas"]
        return all(each["state"] == "up" for each in states.values())

    wait_until("both replicas are up", all_up)
