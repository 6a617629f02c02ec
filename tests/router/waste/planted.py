"""Sessions of agents with planted mistakes, each under a key of its own."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from click.testing import CliRunner

from bench.replica.tiers import call
from router.api.access import sha256_of
from router.cli.commands import main
from simulator.openai_prompts import NUM_WORDS, text_of

KEYS = ("stamp", "tools", "cut", "salt", "ram", "sound")
"""The names of the clients' keys, for the mistakes."""


def access() -> dict[str, Any]:
    """Return the router's setting ``access`` for these keys."""
    return {"keys": [{"name": each, "sha256": sha256_of(each)} for each in KEYS]}


def words(count: int, seed: int) -> str:
    """Return a text that no other seed gives."""
    return text_of(random.Random(seed).choices(range(NUM_WORDS), k=count))


def message(role: str, count: int, seed: int) -> dict[str, Any]:
    return {"role": role, "content": words(count, seed)}


def tool(name: str, seed: int) -> dict[str, Any]:
    """Return a function that an agent may call."""
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    function = {"name": name, "description": words(12, seed), "parameters": schema}
    return {"type": "function", "function": function}


@dataclass
class Agent:
    """Sends the turns of one session, and adds up what the replicas say."""

    router: str
    key: str
    model: str
    prompts: list[int] = field(default_factory=list)
    """Prompt tokens of each turn."""
    cached: list[int] = field(default_factory=list)
    """Cached tokens of each turn."""

    def send(self, messages: Sequence[dict[str, Any]], **more: Any) -> None:
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": 2,
            "prompt_cache_key": self.key,
            **more,
        }
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.router}/v1/chat/completions"
        usage = call(url, body, headers=headers, timeout_s=300)["usage"]
        self.prompts.append(usage["prompt_tokens"])
        self.cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    @property
    def computed(self) -> int:
        """Tokens that were computed, by the replicas' usage."""
        return sum(self.prompts) - sum(self.cached)

    def lost(self, block_tokens: int) -> int:
        """Return the tokens of each prompt before that would have been cached, and were not."""
        pairs = zip(self.prompts, self.prompts[1:], self.cached[1:], strict=False)
        return sum(
            min(before, now - 1) // block_tokens * block_tokens - cached
            for before, now, cached in pairs
        )


@dataclass
class Planted:
    """Runs the sessions against one router."""

    router: str
    model: str
    scale: int = 1
    """How many times as long the texts are."""

    def agent(self, key: str) -> Agent:
        return Agent(self.router, key, self.model)

    def history(self, seed: int) -> list[dict[str, Any]]:
        counts = ("system", 160), ("user", 60), ("assistant", 50), ("user", 70), ("assistant", 40)
        return [
            message(role, count * self.scale, 100 * seed + at)
            for at, (role, count) in enumerate([*counts, ("user", 50)])
        ]

    def sound(self) -> Agent:
        """A session without a mistake."""
        agent, history = self.agent("sound"), self.history(1)
        for count in (2, 4, 6):
            agent.send(history[:count])
        return agent

    def stamp(self) -> Agent:
        """The time in the system prompt."""
        agent, history = self.agent("stamp"), self.history(2)
        for second, count in enumerate((2, 4, 6)):
            system = {"role": "system", "content": f"12:00:0{second} {history[0]['content']}"}
            agent.send([system, *history[1:count]])
        return agent

    def tools(self) -> Agent:
        """Tools in another order in each turn."""
        agent, history = self.agent("tools"), self.history(3)
        tools = [tool(name, seed) for seed, name in enumerate(("read", "write", "search"))]
        for turn, count in enumerate((2, 4, 6)):
            agent.send(history[:count], tools=tools[turn:] + tools[:turn])
        return agent

    def salt(self) -> Agent:
        """Another salt in each turn."""
        agent, history = self.agent("salt"), self.history(4)
        for turn, count in enumerate((2, 4, 6)):
            agent.send(history[:count], cache_salt=f"salt{turn}")
        return agent

    def cut(self) -> tuple[Agent, int]:
        """A history that is cut; return also the tokens of it that the last turn still has."""
        agent, history = self.agent("cut"), self.history(5)
        agent.send(history)
        kept = [history[0], *history[3:]]
        agent.send([*kept, message("assistant", 5, 51), message("user", 6, 52)])
        alone = self.agent("sound")
        alone.send([message("assistant", 5, 51), message("user", 6, 52)])
        return agent, agent.prompts[-1] - alone.prompts[-1]

    def ram(self, evict: Callable[[], None]) -> Agent:
        """A prompt whose KV leaves the caches before its next turn."""
        agent, history = self.agent("ram"), self.history(6)
        agent.send(history[:4])
        evict()
        agent.send(history)
        return agent


def report(router: str) -> tuple[dict[str, Any], str]:
    """Return the report of a router of this user as JSON, and as ``warmroute waste`` prints it."""
    shown = CliRunner().invoke(main, ["waste", "--router", router])
    assert shown.exit_code == 0, shown.output
    return call(f"{router}/waste"), click.unstyle(shown.output)


def of_key(shown: dict[str, Any], key: str) -> dict[str, Any]:
    """Return what a report says of a key."""
    (found,) = (each for each in shown["keys"] if each["key"] == key)
    return dict(found)
