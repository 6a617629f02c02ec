"""Whether a replica's agent answers, and is that replica's; and LMCache's server, where it has one.

What an agent tells is given to the fleet, as the router's own feed of it does.
"""

from importlib.metadata import version
from typing import Final

import aiohttp

from router.agent_client import AgentClient, AgentError, AgentRefusedError
from router.doctor.findings import Section
from router.doctor.replica_checks import Examined, Parts
from router.feeds import KvFeed
from router.lmcache import LmcacheServerClient, LmcacheServerError
from warmroute_common.agent_protocol import InstanceInfo, TierInfo
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret

_WANTS_SECRET: Final = 401
_MEND: Final = (
    "run the replica with 'warmroute replica', correct agent_url, or take it out: until "
    "then its CPU and disk tiers are not known, and nothing is prefetched"
)


async def check_agent(
    parts: Parts, seen: Examined, feed: KvFeed, secret: FleetSecret | None
) -> None:
    """Ask a replica's agent what it is; note it with the replica, the fleet and the feed."""
    session, fleet = parts.session, parts.fleet
    section, config = seen.section, seen.config
    if config.lmcache is not None:
        await _check_lmcache(session, section, config.lmcache)
        return
    if config.agent_url is None:
        found = "has no agent_url: nothing is prefetched there, or copied from other replicas"
        section.note("agent", found, "run it with 'warmroute replica' where it should")
        return
    try:
        info = await AgentClient(session, config.agent_url, secret).info()
    except AgentRefusedError as error:
        if error.status != _WANTS_SECRET:
            section.trouble("agent", f"its agent refuses the router ({error})", _MEND)
            return
        found = f"its agent asks for the fleet secret, and here {_known(secret)}"
        section.trouble("fleet-secret", found, HOW_TO_SET)
        return
    except AgentError as error:
        section.trouble("agent", f"its agent cannot be asked ({error})", _MEND)
        return
    seen.info = info
    feed.agent_told(info, fleet.apply_info(seen.replica.id, info))
    section.ok("agent", _described(info))
    _check_identity(seen, info)
    if secret is not None:
        await _check_asks(session, section, config.agent_url)


async def _check_asks(session: aiohttp.ClientSession, section: Section, url: str) -> None:
    """Note an agent that answers calls without a secret."""
    try:
        await AgentClient(session, url).info()
    except AgentError:
        section.ok("fleet-secret", "its agent asks for the fleet secret")
        return
    found = "its agent answers everyone who reaches it, although the router has a fleet secret"
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
        found = f"its agent is one of '{info.model}', which url does not serve"
        section.trouble("agent-model", found, "let url and agent_url name the same replica")
    if named is not None and named != info.instance_id:
        found = f"its agent calls it '{info.instance_id}' (lmcache_instance_id), the file '{named}'"
        section.note("agent-name", found, "give both the same name")
    ours = version("warmroute")
    if info.version and info.version != ours:
        found = f"its engine is warmroute {info.version}, the router here {ours}"
        section.trouble("agent-version", found, "install the same version on both")


async def _check_lmcache(session: aiohttp.ClientSession, section: Section, url: str) -> None:
    try:
        told = await LmcacheServerClient(session, url).status()
    except LmcacheServerError as error:
        mend = "start it ('lmcache server --http-port'), or correct lmcache at this replica"
        section.trouble("lmcache", f"its LMCache server cannot be asked ({error})", mend)
        return
    worlds = told.world_sizes()
    found = f"its LMCache server answers: chunks of {told.chunk_size}, hash {told.hash_algorithm}"
    section.ok("lmcache", found)
    if not worlds:
        mend = "start vLLM with LMCacheMPConnector and this server's port"
        section.trouble("lmcache-vllm", "no vLLM has registered with its LMCache server", mend)
