"""Moves of chunks between instances: whether they can be, and how they go."""

from dataclasses import dataclass
from typing import Any

from cacheengine.wire import InstanceInfo, MoveStatus
from router.config import Conflict, is_loopback
from router.controller.registry import Instance
from router.staging import AgentClient, AgentRefused, transfer_address


@dataclass(kw_only=True)
class AcceptedMove:
    """A move that an agent has accepted, and will be asked about."""

    destination: Instance
    agent_event_id: str
    num_tokens: int
    chunk_tokens: int
    final: MoveStatus | None = None
    """How it ended, once that is known: its agent may forget it."""


def check_in_reach(source: Instance, target: Instance) -> None:
    """Raise `Conflict` if the source's address means another machine to the target."""
    if is_loopback(source.agent_url) and not is_loopback(target.agent_url):
        raise Conflict(
            f"{target.id}, at {target.agent_url}, cannot reach {source.id} at "
            f"{source.agent_url}, its address on this machine alone: give it an agent_url that "
            "other machines can use",
            param="old_position",
        )


def source_address(source: Instance, source_info: InstanceInfo, target: InstanceInfo) -> str:
    """Return where the target fetches the source's chunks; raise `Conflict` if it cannot."""
    if source_info.incarnation == target.incarnation:
        return ""  # Between tiers of one replica: nothing is sent.
    if source_info.layout != target.layout:
        names = ("model", "hash_algorithm", "hash_seed", "block_tokens", "chunk_tokens")
        differing = [
            f"{name} {getattr(source_info, name)} and {getattr(target, name)}"
            for name in names
            if getattr(source_info, name) != getattr(target, name)
        ]
        why = "; ".join(differing) or "dtype, weights, parallel layout or vLLM's options"
        raise Conflict(f"the two instances' chunks are not alike: they differ in {why}")
    if source_info.transfer_port is None:
        raise Conflict(
            f"'{source.id}' gives no chunks away: set distributed_url in its configuration",
            param="old_position",
        )
    return transfer_address(source.agent_url, source_info.transfer_port)


async def status_or_none(agent: AgentClient, move: AcceptedMove) -> MoveStatus | None:
    """Return how a move goes; None if its agent does not know it. Raises `AgentError`."""
    try:
        return await agent.move_status(move.agent_event_id)
    except AgentRefused as error:
        if error.status == 404:
            return None
        raise


def progress(move: AcceptedMove, status: MoveStatus) -> dict[str, Any]:
    """Return how a move goes, for the caller that has asked for it."""
    shown = {
        "status": status.state,
        "num_tokens": move.num_tokens,
        "arrived_tokens": status.arrived_chunks * move.chunk_tokens,
        "moved_bytes": status.moved_bytes,
    }
    return {**shown, "error": status.error} if status.error else shown
