"""Two replicas of one kind, and before them a router that prefetches and one that does not."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import openai

from bench.lmcache.environment import python
from bench.lmcache.replica import LmcacheReplica, OurReplica, Startable, start_together
from bench.replica import local
from bench.replica.demo import ANSWER_TOKENS, say
from bench.replica.text import real_text
from bench.replica.tiers import call, metric, wait_until
from bench.ttft import Answer, ask
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup

_SPARE_TOKENS: Final = 512
_WARM_UP_TOKENS: Final = 2048
_REPLICAS: Final = 2

LMCACHE: Final = "lmcache"
OURS: Final = "warmroute"


class Replica(Startable, Protocol):
    """A replica of either kind; it must be idle while its tiers are changed."""

    name: str
    url: str

    @property
    def entry(self) -> dict[str, str]:
        """The replica in a router's configuration."""

    def stop(self, *, whole: bool) -> None:
        """End vLLM; where ``whole``, everything, and drop the page cache. Files stay."""

    def tidy(self) -> None:
        """Remove what it has left on this machine, its disk tier included."""

    def chat_tokens(self, content: str) -> list[int]:
        """Return the tokens of a chat prompt with one message of a user's."""

    def empty_gpu(self) -> None:
        """Empty vLLM's own cache, and have it tell so."""

    def wait_stored(self, tokens: Sequence[int]) -> None:
        """Wait until every full chunk of a prompt is stored below the GPU."""

    def leave_on_disk(self, tokens: Sequence[int]) -> None:
        """Have a prompt's chunks on disk alone, and out of the page cache."""


class Stage:
    """What runs between `start` and `end`; all of it belongs to ``group``."""

    def __init__(
        self, group: ProcessGroup, kind: str, *, model: str, tokens: int, directory: Path
    ) -> None:
        """``kind`` is `LMCACHE` or `OURS`; ``tokens`` the longest prompt's."""
        self._group = group
        self._directory = directory
        self.model = model
        ports = free_ports(7)
        self._ports = ports[:2]
        self._controllers = [
            {"port": port, "monitor_port": monitor_port}
            for port, monitor_port in zip(ports[2:4], ports[4:6], strict=True)
        ]
        self._relay_port = ports[6]
        self.url, self.plain_url = (f"http://127.0.0.1:{port}" for port in self._ports)
        self._is_lmcache = kind == LMCACHE
        make: Callable[..., Replica] = OurReplica
        if self._is_lmcache:
            url = f"http://127.0.0.1:{self._relay_port}"
            make = partial(LmcacheReplica, python=python(), coordinator_url=url)
        self.replicas: dict[str, Replica] = {
            name: make(
                group,
                name,
                model=model,
                served_name=model,
                directory=directory,
                index=index,
                of=_REPLICAS,
                max_model_tokens=max(local.MAX_MODEL_TOKENS, tokens + _SPARE_TOKENS),
            )
            for index, name in enumerate(f"{kind}{number + 1}" for number in range(_REPLICAS))
        }

    def start(self) -> None:
        """Start everything; return when the routers know the replicas."""
        say(f"{', '.join(self.replicas)}: starting; logs in {self._directory}")
        # Before LMCache's servers, so that the routers miss none of their events.
        for settings in self._routers():
            self._start_router(settings)
        if self._is_lmcache:
            self._start_relay()
        start_together(list(self.replicas.values()))
        self._warm_up("cpu", "disk")

    def restart(self, *, whole: bool) -> None:
        """Restart the vLLMs; where ``whole``, all that keeps KV, and drop the page cache."""
        for each in self.replicas.values():
            each.stop(whole=whole)
        start_together(list(self.replicas.values()))
        self._warm_up("cpu")

    def end(self) -> None:
        """End everything, and leave nothing but logs."""
        self._group.stop_all()
        for each in self.replicas.values():
            each.tidy()

    def ask(self, url: str, content: str) -> Answer:
        """Ask a router, or a replica itself."""
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=900.0, max_retries=0
        ) as client:
            return ask(client, model=self.model, content=content, max_tokens=ANSWER_TOKENS)

    def matched(self, url: str, content: str) -> dict[str, int]:
        """Return what a router knows of a prompt, by tier."""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        found: dict[str, int] = call(f"{url}/explain", body)["matched_tokens"]
        return found

    def _routers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of both routers."""
        common = {
            "tokenizer": {"path": str(Path(self.model).resolve())},
            "replicas": [each.entry for each in self.replicas.values()],
        }
        first, plain = (common | {"port": port} for port in self._ports)
        plain["prefetch"] = {"enabled": False}
        if self._is_lmcache:
            first["controller"], plain["controller"] = self._controllers
        return first, plain

    def _start_router(self, settings: dict[str, Any]) -> None:
        name = "router" if settings["port"] == self._ports[0] else "router-without-prefetch"
        config = self._directory / f"{name}.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        log = self._directory / f"{name}.log"
        self._group.start(name, local.router_command(config), None, log)
        # Without a replica that is up /health is 503.
        url = f"http://127.0.0.1:{settings['port']}/ui"
        self._group.wait_ready(name, url, local.ROUTER_READY_TIMEOUT_S)

    def _start_relay(self) -> None:
        """Relay the events of LMCache's servers to both routers."""
        name, port = "event-relay", self._relay_port
        urls = [f"http://127.0.0.1:{each['port']}" for each in self._controllers]
        command = [sys.executable, "-m", "bench.lmcache.event_relay", str(port), *urls]
        self._group.start(name, command, None, self._directory / f"{name}.log")
        ready = f"http://127.0.0.1:{port}/healthz"
        self._group.wait_ready(name, ready, local.ROUTER_READY_TIMEOUT_S)

    def _all_up(self, url: str) -> bool:
        return metric(url, "warmroute_replica_up") == len(self.replicas)

    def _warm_up(self, *tiers: str) -> None:
        """Have each replica compute and load once: its first time of each is slower.

        Begins when both routers know that the replicas are up.
        """
        for url in (self.url, self.plain_url):
            wait_until(f"{url}: knows its replicas", partial(self._all_up, url))
        content = f"Warming up. {real_text(_WARM_UP_TOKENS, seed=0)}"
        for replica in self.replicas.values():
            say(f"{replica.name}: warming up")
            tokens = replica.chat_tokens(content)
            self.ask(replica.url, content)
            for tier in tiers:
                replica.wait_stored(tokens)
                replica.empty_gpu()
                if tier == "disk":
                    replica.leave_on_disk(tokens)
                self.ask(replica.url, content)
