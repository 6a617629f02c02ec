"""Checks of one replica: server, models, version, clock, agent, LMCache server and tokens."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import aiohttp
import orjson

from router.agent_client import AgentClient, AgentError, AgentRefusedError
from router.config.settings import ReplicaConfig, RouterConfig
from router.doctor.findings import Section
from router.doctor.http_probe import HttpAnswer, ProbeError, get, send
from router.feeds.feeds import KvFeed
from router.feeds.kv_receiver import KvReceiver
from router.feeds.replica_answers import (
    authorization,
    fetch,
    model_entries,
    pulled,
    served_models,
)
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.lmcache.server_client import LmcacheServerClient, LmcacheServerError
from router.prompt.prompt_source import PromptSource
from router.prompt.request_body import REMOTE_DECODE
from router.prompt.token_trust import HANGS
from warmroute_common.agent_protocol import InstanceInfo, TierInfo
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret
from warmroute_common.keys import DEFAULT_SEED

MOST_AHEAD_S: Final = 2.0
_MODELS_SHOWN: Final = 5


@dataclass(frozen=True)
class CheckContext:
    """What the checks use."""

    config: RouterConfig
    fleet: Fleet
    session: aiohttp.ClientSession
    receiver: KvReceiver
    prompts: PromptSource | None
    """None if the configured tokenizer does not load."""


@dataclass(kw_only=True)
class Examined:
    """A replica, and what it has reported."""

    replica: Replica
    """The replica in the fleet, which the checks update."""
    section: Section
    answers: bool = False
    entries: list[dict[str, object]] | None = None
    """From its ``/v1/models``; None if it has none."""
    version: str | None = None
    """Version of vLLM; None for other servers."""
    info: InstanceInfo | None = None
    """From its agent."""

    @property
    def config(self) -> ReplicaConfig:
        """Its settings."""
        return self.replica.config

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.config.name

    @property
    def models(self) -> list[str]:
        """The names of the models that it serves."""
        return [str(each["id"]) for each in self.entries or []]

    @property
    def roots(self) -> set[str]:
        """The base models behind the models that it serves."""
        return {str(each.get("root") or each["id"]) for each in self.entries or []}


def hash_in_words(algorithm: str, seed: str) -> str:
    """Return the hash settings in words."""
    set_to = "not set" if seed == DEFAULT_SEED else seed
    return f"{algorithm} with PYTHONHASHSEED {set_to}"


async def check_replica(
    session: aiohttp.ClientSession, seen: Examined, *, is_keyed: bool, timeout_s: float
) -> None:
    """Ask a replica for its health, models and version, and note the findings.

    ``is_keyed``: the router requires keys of its own from clients.
    """
    section, config = seen.section, seen.config

    async def answer(path: str) -> HttpAnswer:
        headers = authorization(config)
        return await get(session, config.url + path, headers=headers, timeout_s=timeout_s)

    try:
        health = await answer("/health")
        seen.answers = health.status < 500
        models, version = await answer("/v1/models"), await answer("/version")
    except ProbeError as error:
        fix = "start it, or correct its url; until then it gets no requests"
        section.problem("health", str(error), fix)
        seen.answers = False
        return
    if not seen.answers:
        fix = "look into its log: vLLM reports there that its engine has died"
        section.problem("health", f"answers /health with {health.status}", fix)
        return
    seen.version = _version(version)
    seen.entries = _entries(models)
    runs = "a server without a version" if seen.version is None else f"vLLM {seen.version}"
    section.ok("health", f"answers, and runs {runs}")
    _report_models(seen, models, is_keyed=is_keyed)
    _report_clock(section, health)


def _report_models(seen: Examined, answer: HttpAnswer, *, is_keyed: bool) -> None:
    section, has_key = seen.section, seen.config.api_key is not None
    if answer.status in (401, 403):
        if has_key:
            fix = "correct api_key at this replica"
            section.problem("key", f"refuses the router's key ({answer.status})", fix)
        elif is_keyed:
            found = f"requires a key ({answer.status}), and clients' keys are not forwarded"
            section.problem("key", found, "set api_key at this replica")
        else:
            found = (
                f"requires a key ({answer.status}): clients' keys are forwarded, but without its "
                "own key the router does not know this replica's models and tokens"
            )
            section.problem("key", found, "set api_key at this replica")
    elif seen.entries is None:
        found = f"does not list its models (/v1/models: {answer.status})"
        section.problem("models", found, "check that url is an OpenAI server's, without a path")
    elif not seen.entries:
        section.problem("models", "lists no model at /v1/models", "look into its log")
    else:
        shown = ", ".join(f"'{each}'" for each in seen.models[:_MODELS_SHOWN])
        more = len(seen.models) - _MODELS_SHOWN
        section.ok("models", f"serves {shown}" + (f" and {more} more" if more > 0 else ""))


def _report_clock(section: Section, answer: HttpAnswer) -> None:
    ahead_s = answer.clock_ahead_s
    if ahead_s is not None and abs(ahead_s) > MOST_AHEAD_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        found = f"its clock is {abs(ahead_s):.0f} s {side} this machine's: logs do not line up"
        section.problem("clock", found, "synchronize both clocks with NTP")


def _entries(answer: HttpAnswer) -> list[dict[str, object]] | None:
    return list(model_entries(answer.json())) if answer.status == 200 else None


def _version(answer: HttpAnswer) -> str | None:
    found = answer.json() if answer.status == 200 else None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, str) else None


_WANTS_SECRET: Final = 401
_FIX: Final = (
    "run the replica with 'warmroute replica', correct agent_url, or remove it: until then "
    "the router does not know its CPU and disk tiers, and prefetches nothing"
)


async def check_agent(
    parts: CheckContext, seen: Examined, feed: KvFeed, secret: FleetSecret | None
) -> None:
    """Ask a replica's agent for its settings; apply them to the replica, the fleet and the feed."""
    session, fleet = parts.session, parts.fleet
    section, config = seen.section, seen.config
    if config.lmcache is not None:
        await _check_lmcache(session, section, config.lmcache)
        return
    if config.agent_url is None:
        found = "has no agent_url: nothing is prefetched or copied there"
        section.note("agent", found, "run it with 'warmroute replica' for that")
        return
    try:
        info = await AgentClient(session, config.agent_url, secret).info()
    except AgentRefusedError as error:
        if error.status != _WANTS_SECRET:
            section.problem("agent", f"its agent refuses the router's request ({error})", _FIX)
            return
        found = f"its agent requires the fleet secret, but here {_known(secret)}"
        section.problem("fleet-secret", found, HOW_TO_SET)
        return
    except AgentError as error:
        section.problem("agent", f"its agent does not answer ({error})", _FIX)
        return
    seen.info = info
    feed.note_agent_info(info, fleet.apply_info(seen.replica.id, info))
    section.ok("agent", _described(info))
    _check_identity(seen, info)
    if secret is not None:
        await _check_secret(session, section, config.agent_url)


async def _check_secret(session: aiohttp.ClientSession, section: Section, url: str) -> None:
    """Note an agent that answers calls without a secret."""
    try:
        await AgentClient(session, url).info()
    except AgentError:
        section.ok("fleet-secret", "its agent requires the fleet secret")
        return
    found = "its agent answers every caller, although the router has a fleet secret"
    section.note("fleet-secret", found, HOW_TO_SET)


def _known(secret: FleetSecret | None) -> str:
    return "none is set" if secret is None else "another one is set"


def _described(info: InstanceInfo) -> str:
    tiers = "".join(f"; {name} {_filled(tier)}" for name, tier in info.tiers.items())
    engine = f"warmroute {info.version}" if info.version else "an agent without a version"
    return f"its agent answers: {engine}, chunks of {info.chunk_tokens} tokens{tiers}"


def _filled(tier: TierInfo) -> str:
    if not tier.capacity_bytes:
        return f"{_size(tier.used_bytes)} used"
    return f"{tier.used_bytes / tier.capacity_bytes:.0%} of {_size(tier.capacity_bytes)}"


def _size(nbytes: float) -> str:
    for unit, per_unit in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= per_unit:
            return f"{nbytes / per_unit:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def _check_identity(seen: Examined, info: InstanceInfo) -> None:
    section, named = seen.section, seen.config.instance_id
    if seen.entries and info.model not in {*seen.roots, *seen.models}:
        found = f"its agent belongs to a replica of '{info.model}', which url does not serve"
        section.problem(
            "agent-model", found, "correct url or agent_url: both must be one replica's"
        )
    if named is not None and named != info.instance_id:
        found = f"its agent calls it '{info.instance_id}' (lmcache_instance_id), the file '{named}'"
        fix = "give both the same name; if agent_url is another replica's, correct it"
        section.note("agent-name", found, fix)
    ours = version("warmroute")
    if info.version and info.version != ours:
        found = f"its engine is warmroute {info.version}, the router here {ours}"
        section.problem("agent-version", found, "install the same version on both")


async def _check_lmcache(session: aiohttp.ClientSession, section: Section, url: str) -> None:
    try:
        status = await LmcacheServerClient(session, url).status()
    except LmcacheServerError as error:
        fix = "start it ('lmcache server --http-port'), or correct lmcache at this replica"
        section.problem("lmcache", f"its LMCache server does not answer ({error})", fix)
        return
    worlds = status.world_sizes()
    found = (
        f"its LMCache server answers: chunks of {status.chunk_size}, hash {status.hash_algorithm}"
    )
    section.ok("lmcache", found)
    if not worlds:
        fix = "start vLLM with LMCacheMPConnector and this server's port"
        section.problem("lmcache-vllm", "no vLLM has registered with its LMCache server", fix)


_NIXL_ANSWER_S: Final = 60.0
_NIXL_FIX: Final = (
    "start its vLLM with --kv-transfer-config "
    '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', or remove nixl_role here'
)


async def check_nixl(session: aiohttp.ClientSession, seen: Examined) -> None:
    """Have a replica with a ``nixl_role`` prefill one short prompt for another replica.

    Its vLLM frees the prompt's KV when the lease ends, since nobody pulls it.
    """
    if not seen.models:
        return
    body = {
        "model": seen.models[0],
        "prompt": "The doctor asks for the KV of this prompt.",
        "max_tokens": 1,
        "kv_transfer_params": REMOTE_DECODE,
    }
    headers = {**authorization(seen.config), "Content-Type": "application/json"}
    url, encoded = f"{seen.config.url}/v1/completions", orjson.dumps(body)
    try:
        answer = await send(
            session, "POST", url, headers=headers, body=encoded, timeout_s=_NIXL_ANSWER_S
        )
    except ProbeError as error:
        seen.section.problem("nixl", f"a prompt to prefill was not answered ({error})")
        return
    given = answer.json() if answer.status == 200 else None
    params = given.get("kv_transfer_params") if isinstance(given, dict) else None
    if answer.status != 200:
        why = answer.body[:200].decode(errors="replace")
        seen.section.problem("nixl", f"a prompt to prefill got {answer.status}: {why}", _NIXL_FIX)
    elif not isinstance(params, dict) or not params.get("remote_engine_id"):
        found = (
            f"nixl_role is '{seen.config.nixl_role}', but its answer has no kv_transfer_params: "
            "NixlConnector does not run there"
        )
        seen.section.problem("nixl", found, _NIXL_FIX)
    else:
        at = f"{params.get('remote_host')}:{params.get('remote_port')}"
        seen.section.ok("nixl", f"NixlConnector runs; other replicas reach it at {at}")


_LEAST_PULLED_BYTES: Final = 100e6
"""Fewer say little about the speed."""
_SLOW_PULLS_BYTES_PER_S: Final = 1e9


async def check_pulls(session: aiohttp.ClientSession, seen: Examined, timeout_s: float) -> None:
    """Check how fast a replica has pulled KV from others so far, by its own metrics."""
    metrics = await fetch(session, seen.config, "/metrics", timeout_s=timeout_s)
    nbytes, seconds = pulled((metrics or b"").decode(errors="replace"))
    if nbytes < _LEAST_PULLED_BYTES or seconds <= 0:
        return
    found = f"it has pulled KV at {nbytes / seconds / 1e9:.2g} GB/s"
    if nbytes / seconds >= _SLOW_PULLS_BYTES_PER_S:
        seen.section.ok("nixl-pulls", found)
        return
    fix = (
        "if its GPU and the others share a host without NVLink, start each vLLM with "
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on; between hosts, see that UCX finds the fast network"
    )
    seen.section.note("nixl-pulls", f"{found}: computing may be faster", fix)


_TEXT_FIX = "set tokenizer.path to the tokenizer of the model that runs there"
_CHAT_FIX = "set tokenizer.chat_template, if the replica runs with --chat-template"


async def check_tokens(
    session: aiohttp.ClientSession,
    seen: Examined,
    prompts: PromptSource,
    secret: FleetSecret | None,
) -> None:
    """Compare the router's tokens of the probes with those of the replica's ``/tokenize``."""
    section = seen.section
    if not seen.entries:
        return
    url, headers = seen.config.url, authorization(seen.config)
    agent = None if seen.info is None else AgentClient(session, seen.config.agent_url or "", secret)
    await prompts.learn(
        served_models(seen.entries), session=session, url=url, headers=headers, agent=agent
    )
    readers = {prompts.reader_for(each) for each in seen.models}
    known = [each for each in readers if each.has_tokenizer]
    why_asked = next(filter(None, map(prompts.asked().get, seen.models)), None)
    if len(known) < len(readers) and why_asked is None:
        _report_missing(seen, prompts)
    report = section.problem if why_asked is None else section.note
    then = "prompts are matched by text" if why_asked is None else "replicas are asked for tokens"
    results = [each.compared(url) for each in known]
    texts, chats = [text for text, _ in results], [chat for _, chat in results]
    if any(each.deviates(url) for each in readers):
        found = "its tokens differ from those of other replicas: prompts are matched by text there"
        section.problem("tokens", found, "run one version of vLLM, with one --chat-template")
    elif False in texts:
        report("tokens", f"its tokens of a text differ from the router's: {then}", _TEXT_FIX)
    elif False in chats:
        found = f"its tokens of a chat differ from the router's: {then}"
        report("chat-template", found, _CHAT_FIX)
    elif why_asked is not None:
        section.note("tokenizer", why_asked)
    elif HANGS in [each.not_compared(url) for each in known]:
        section.problem("tokens", f"it hangs: its {HANGS}", "see its log, or restart it")
    elif None in texts:
        found = "its tokens could not be compared: its /tokenize does not answer as vLLM's does"
        section.note("tokens", found, "the router uses its own")
    elif known:
        kinds = "texts and chats" if True in chats else "texts"
        section.ok("tokens", f"its tokens of {kinds} equal the router's")


def _report_missing(seen: Examined, prompts: PromptSource) -> None:
    reasons = [prompts.inexact().get(each) for each in seen.models]
    why = next(filter(None, reasons), None)
    if why is None:  # not vLLM's: nothing that it holds is known by tokens
        found = (
            f"no tokenizer of {_quoted(seen.roots)} on this machine: prompts are matched by text"
        )
        seen.section.note("tokenizer", found, "set tokenizer.path to match by tokens")
        return
    fix = "until then the router does not know what replicas hold of its prompts"
    seen.section.problem("tokenizer", why, fix)


def _quoted(names: set[str]) -> str:
    return ", ".join(f"'{each}'" for each in sorted(names))
