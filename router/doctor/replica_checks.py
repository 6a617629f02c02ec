"""Whether a replica answers, which models it serves, what it runs, how its clock goes."""

from dataclasses import dataclass
from typing import Final

import aiohttp
import zmq.asyncio

from router.config import ReplicaConfig, RouterConfig
from router.doctor.asking import NoAnswerError, Told, get
from router.doctor.findings import Section
from router.feeds import authorization, model_entries
from router.fleet import Fleet, Replica
from router.prompt import PromptSource
from warmroute_common.agent_protocol import InstanceInfo
from warmroute_common.keys import DEFAULT_SEED

MOST_AHEAD_S: Final = 2.0
_MODELS_SHOWN: Final = 5


@dataclass(frozen=True)
class Parts:
    """What replicas are examined by."""

    config: RouterConfig
    fleet: Fleet
    session: aiohttp.ClientSession
    context: zmq.asyncio.Context
    prompts: PromptSource | None
    """None where the configured tokenizer does not load."""


@dataclass(kw_only=True)
class Examined:
    """A replica, and what it has told."""

    replica: Replica
    """As the fleet knows it, which the checks tell what they find."""
    section: Section
    answers: bool = False
    entries: list[dict[str, object]] | None = None
    """Of its ``/v1/models``; None where it does not tell."""
    version: str | None = None
    """Of vLLM; None where it does not tell, as other servers do not."""
    info: InstanceInfo | None = None
    """Its agent's."""

    @property
    def config(self) -> ReplicaConfig:
        """What the file says of it."""
        return self.replica.config

    @property
    def name(self) -> str:
        """As the file has it."""
        return self.config.name

    @property
    def models(self) -> list[str]:
        """The names of what it serves."""
        return [str(each["id"]) for each in self.entries or []]

    @property
    def roots(self) -> set[str]:
        """Where its models come from."""
        return {str(each.get("root") or each["id"]) for each in self.entries or []}


def hash_in_words(algorithm: str, seed: str) -> str:
    """Return how keys are made, as a person sets it."""
    set_to = "not set" if seed == DEFAULT_SEED else seed
    return f"{algorithm} with PYTHONHASHSEED {set_to}"


async def check_replica(
    session: aiohttp.ClientSession, seen: Examined, *, is_keyed: bool, timeout_s: float
) -> None:
    """Ask a replica how it is, and note what it tells.

    ``is_keyed``: whether the router asks clients for keys of its own.
    """
    section, config = seen.section, seen.config

    async def asked(path: str) -> Told:
        headers = authorization(config)
        return await get(session, config.url + path, headers=headers, timeout_s=timeout_s)

    try:
        health = await asked("/health")
        seen.answers = health.status < 500
        models, version = await asked("/v1/models"), await asked("/version")
    except NoAnswerError as error:
        mend = "start it, or correct its url: until then it gets no requests"
        section.trouble("health", str(error), mend)
        seen.answers = False
        return
    if not seen.answers:
        mend = "look into its log: vLLM says so when its engine has died"
        section.trouble("health", f"answers /health with {health.status}", mend)
        return
    seen.version = _version(version)
    seen.entries = _entries(models)
    runs = "a server that tells no version" if seen.version is None else f"vLLM {seen.version}"
    section.ok("health", f"answers, and runs {runs}")
    _tell_models(seen, models, is_keyed=is_keyed)
    _tell_clock(section, health)


def _tell_models(seen: Examined, told: Told, *, is_keyed: bool) -> None:
    section, has_key = seen.section, seen.config.api_key is not None
    if told.status in (401, 403):
        if has_key:
            mend = "correct api_key at this replica"
            section.trouble("key", f"refuses the router's key ({told.status})", mend)
        elif is_keyed:
            found = f"asks for a key ({told.status}), and the router forwards none of the clients'"
            section.trouble("key", found, "set api_key at this replica")
        else:
            found = (
                f"asks for a key ({told.status}): clients' own are forwarded, but the router has "
                "none, and knows neither its models nor its tokens"
            )
            section.trouble("key", found, "set api_key at this replica")
    elif seen.entries is None:
        found = f"does not list its models (/v1/models: {told.status})"
        section.trouble("models", found, "is url that of an OpenAI server, without a path?")
    elif not seen.entries:
        section.trouble("models", "lists no model at /v1/models", "look into its log")
    else:
        shown = ", ".join(f"'{each}'" for each in seen.models[:_MODELS_SHOWN])
        more = len(seen.models) - _MODELS_SHOWN
        section.ok("models", f"serves {shown}" + (f" and {more} more" if more > 0 else ""))


def _tell_clock(section: Section, told: Told) -> None:
    ahead_s = told.clock_ahead_s
    if ahead_s is not None and abs(ahead_s) > MOST_AHEAD_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        found = f"its clock is {abs(ahead_s):.0f} s {side} this machine's: logs do not line up"
        section.trouble("clock", found, "have both set theirs by NTP")


def _entries(told: Told) -> list[dict[str, object]] | None:
    return list(model_entries(told.json())) if told.status == 200 else None


def _version(told: Told) -> str | None:
    answer = told.json() if told.status == 200 else None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None
