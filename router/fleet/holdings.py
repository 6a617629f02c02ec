"""What replicas tell of the KV that they hold: by their agents, by KV events, by copies."""

from collections.abc import Sequence
from typing import Final

from router.fleet.eligibility import Roster
from router.fleet.phases import Unseen
from router.fleet.replica import Replica, Replicas
from router.index import (
    LOWER_TIERS,
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    KvBatch,
    KvEvent,
    LmcacheKeys,
    PrefixIndex,
    Tier,
)
from router.latency import Part
from warmroute_common.agent_protocol import EventBatch, InstanceInfo, Snapshot, unpack_keys

_TELLING_COPY_TOKENS: Final = 1024
_REST_FROM_COPIES_S: Final = 5.0


class Holdings:
    """The replicas of a fleet and what each holds; the part of `Fleet` that feeds call."""

    def __init__(self, replicas: Replicas, roster: Roster, index: PrefixIndex) -> None:
        self.replicas = replicas
        self.index = index
        self.unseen = Unseen()
        self._roster = roster

    # --- what agents tell

    def apply_info(self, replica_id: str, info: InstanceInfo) -> bool:
        """Take over what an agent says of its replica; return whether it has started anew.

        A replica that has is forgotten. One without a name gets the agent's, unless that is taken.
        """
        replica = self.replicas[replica_id]
        if restarted := replica.take_info(info):
            self.index.forget(replica.slot)
            self._roster.changed()
        if replica.config.instance_id is None and info.instance_id not in self.replicas:
            self.replicas.rename(replica.id, info.instance_id)
            self._roster.changed()
        return restarted

    def apply_snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        """Replace what is known of a replica's lower tiers."""
        self.forget_lower(replica_id)
        for name, packed in snapshot.tiers.items():
            self.change_lower(replica_id, _lower_tier(name), unpack_keys(packed), stored=True)

    def apply_events(self, replica_id: str, batch: EventBatch) -> None:
        """Take over what has changed in a replica's lower tiers."""
        for event in batch.events:
            keys = unpack_keys(event.keys)
            self.change_lower(replica_id, _lower_tier(event.tier), keys, stored=event.stored)

    def change_lower(
        self, replica_id: str, tier: Tier, keys: Sequence[int], *, stored: bool
    ) -> None:
        """Note that keys were stored in, or have left, one of a replica's lower tiers."""
        replica = self.replicas[replica_id]
        if not replica.is_removed:
            change = self.index.add if stored else self.index.remove
            change(replica.slot, tier, keys)

    def forget_lower(self, replica_id: str, *tiers: Tier) -> None:
        """Drop what is known of some of a replica's lower tiers, or of all."""
        self.index.forget(self.replicas[replica_id].slot, tiers or LOWER_TIERS)

    def tie_lmcache(self, replica_id: str, keys: LmcacheKeys | None) -> None:
        """Match a replica's lower tiers anew, by LMCache's chunks; None: it has no LMCache."""
        replica = self.replicas[replica_id]
        replica.lmcache_keys = keys
        self.forget_lower(replica_id)
        self._roster.changed()

    def rest(self, replica_id: str, rests: bool) -> None:
        """Give a replica nothing while another is up, or end that."""
        self.replicas[replica_id].rests = rests
        self._roster.changed()

    # --- what copies tell

    def observed_copy(self, replica_id: str, nbytes: int, seconds: float) -> None:
        """Learn from how long a replica took to get so many bytes from another.

        Of a small copy nothing: most of its time is not the bytes'.
        """
        replica = self.replicas[replica_id]
        if nbytes >= _TELLING_COPY_TOKENS * replica.kv_bytes_per_token and seconds > 0:
            replica.rates.observe_rate(Part.PEER, nbytes / seconds)

    def copy_failed(self, replica_id: str, now_s: float) -> None:
        """Note where a copy failed: for a while nothing is copied from or to that replica."""
        self.replicas[replica_id].no_copies_until_s = now_s + _REST_FROM_COPIES_S

    # --- what KV events tell

    def following_kv(self, replica_id: str) -> None:
        """Note that a replica's KV events are being followed from now on."""
        self.replicas[replica_id].has_events = True

    def apply_kv(self, replica_id: str, batch: KvBatch, now_s: float) -> None:
        """Take over a message of vLLM's KV events, of the tiers of `Replica.event_tiers`."""
        replica = self.replicas[replica_id]
        replica.heard_s = now_s
        for event in batch.events:
            if not isinstance(event, FirstBlocks):
                self._apply_kv_event(replica, event, now_s)
            elif replica.check_shape(event):
                self._roster.changed()

    def lost_kv(self, replica_id: str) -> None:
        """Forget what KV events told: their publisher is gone, began anew, or left a gap."""
        replica = self.replicas[replica_id]
        replica.has_events = False
        self.index.forget(replica.slot, replica.event_tiers)
        # A stock vLLM may come back with another random seed.
        replica.shape_checked = False

    def _apply_kv_event(self, replica: Replica, event: KvEvent, now_s: float) -> None:
        told = () if replica.is_removed else replica.event_tiers
        match event:
            case GpuCleared():
                self.index.forget(replica.slot, (Tier.GPU,))
            case BlocksStored(tier, keys) if tier in told:
                self.index.add(replica.slot, tier, keys, counted=True)
                if tier is Tier.GPU:
                    self.unseen.stored(replica.slot, keys, now_s)
            case BlocksRemoved(tier, keys) if tier in told:
                self.index.remove(replica.slot, tier, keys)


def _lower_tier(name: str) -> Tier:
    """Return the tier that an agent names; one that is not known is the slowest."""
    return Tier(name) if name in LOWER_TIERS else Tier.REMOTE
