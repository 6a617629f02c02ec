"""Applies what LMCache's workers report about their chunks to the fleet's index. Pure.

An instance's chunks are the lower tiers of its replica. Only worker 0 is followed: all ranks store
the same chunks at the same time, each its own part, in pools of equal size. Unknown and late
messages change nothing and are counted.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Final

from router.fleet.fleet import Fleet
from router.index.prompt_keys import KvTier
from router.lmcache.worker_protocol import (
    CPU,
    DISK,
    REMOTE,
    BatchedKVOperationMsg,
    BatchedP2PLookupMsg,
    FromWorker,
    FullSyncBatchMsg,
    FullSyncEndMsg,
    FullSyncStartMsg,
    FullSyncStartRetMsg,
    FullSyncStatusMsg,
    FullSyncStatusRetMsg,
)
from router.lmcache.worker_registry import FullSync, LmcacheWorker, WorkerRegistry
from warmroute_common.keys import KEY64_MASK

_TIERS: Final[Mapping[str, KvTier]] = {CPU: KvTier.CPU, DISK: KvTier.DISK}
LOCATIONS: Final[Mapping[KvTier, str]] = {KvTier.CPU: CPU, KvTier.DISK: DISK, KvTier.REMOTE: REMOTE}


def _tier_of(location: str) -> KvTier:
    """Return a location's tier; an unknown location counts as the slowest."""
    return _TIERS.get(location, KvTier.REMOTE)


class WorkerEvents:
    """Takes the messages of registered workers."""

    def __init__(self, fleet: Fleet, registry: WorkerRegistry) -> None:
        self._fleet = fleet
        self._registry = registry
        self._counts = registry.counts

    def operations(self, message: BatchedKVOperationMsg, now_s: float) -> None:
        """Apply chunks that were stored and evicted."""
        if (worker := self._registry.known(message, now_s)) is None:
            return
        followed = worker.follow(message.location, message.operations)
        if followed is None:
            self._counts["worker_malformed"] += 1
            return
        self._counts["worker_late"] += followed.late
        self._counts["worker_applied"] += len(followed.fresh)
        if followed.gap:
            self._gap(message, worker)
        for stored, run in groupby(followed.fresh, lambda each: each.op_type == "admit"):
            self._apply(message, message.location, [each.key for each in run], stored=stored)

    def sync_started(self, message: FullSyncStartMsg, now_s: float) -> FullSyncStartRetMsg:
        """Forget a location: all its keys will be sent."""
        if (worker := self._registry.known(message, now_s)) is None:
            error = "this worker is not registered here"
            return FullSyncStartRetMsg(sync_id=message.sync_id, accepted=False, error_msg=error)
        worker.begin_sync(message)
        if (replica := self._registry.followed(message)) is not None:
            self._fleet.forget_lower(replica, _tier_of(message.location))
        return FullSyncStartRetMsg(sync_id=message.sync_id, accepted=True)

    def sync_batch(self, message: FullSyncBatchMsg, now_s: float) -> None:
        """Apply some of a location's keys."""
        if (worker := self._syncing(message, now_s)) is None or (sync := worker.sync) is None:
            return
        if message.batch_id >= sync.start.batch_count:
            self._counts["worker_malformed"] += 1
            return
        sync.received.add(message.batch_id)
        self._apply(message, sync.start.location, message.keys, stored=True)
        self._end_sync(worker, sync)

    def sync_ended(self, message: FullSyncEndMsg, now_s: float) -> None:
        """Record that all batches were sent."""
        if (worker := self._syncing(message, now_s)) is None or (sync := worker.sync) is None:
            return
        sync.ended = True
        self._end_sync(worker, sync)

    def sync_status(self, message: FullSyncStatusMsg, now_s: float) -> FullSyncStatusRetMsg:
        """Answer which batches are missing; an unknown sync may end.

        The worker stores nothing until its sync may end. A sync that began before a restart of the
        router cannot be completed: another one is requested.
        """
        worker = self._registry.known(message, now_s)
        sync = None if worker is None else worker.sync
        if sync is None or sync.start.sync_id != message.sync_id:
            return FullSyncStatusRetMsg(
                sync_id=message.sync_id,
                is_complete=False,
                global_progress=0.0,
                can_exit_freeze=True,
            )
        return FullSyncStatusRetMsg(
            sync_id=message.sync_id,
            is_complete=sync.is_complete,
            global_progress=len(sync.received) / sync.start.batch_count,
            can_exit_freeze=sync.is_complete,
            missing_batches=sync.missing(),
        )

    def peer_with(self, message: BatchedP2PLookupMsg, now_s: float) -> tuple[str, str, int, str]:
        """Return the other instance with the longest run of the chunks in CPU RAM.

        In LMCache's form: instance, location, chunks, peer URL; ("", "", 0, "") if there is none.
        Chunks of another model have the same hashes, so only replicas of the same model count.
        """
        best = ("", "", 0, "")
        registry, fleet = self._registry, self._fleet
        own = registry.replica_of(message.instance_id)
        if registry.known(message, now_s) is None or own is None:
            return best
        keys = [each & KEY64_MASK for each in message.hashes]
        for worker in registry.all():
            instance, number = worker.registration.name
            replica, url = registry.replica_of(instance), worker.registration.peer_init_url
            if replica is None or url is None or replica == own or number != message.worker_id:
                continue
            if fleet.replicas[replica].roots != fleet.replicas[own].roots:
                continue
            runs = fleet.index.runs(fleet.replicas[replica].slot, keys, 0)
            if runs and runs[0].tier is KvTier.CPU and runs[0].stop > best[2]:
                best = (instance, CPU, runs[0].stop, url)
        return best

    # --- parts of the above

    def _apply(self, message: FromWorker, location: str, keys: list[int], *, stored: bool) -> None:
        if (replica := self._registry.followed(message)) is not None:
            keys64 = [each & KEY64_MASK for each in keys]
            self._fleet.change_lower(replica, _tier_of(location), keys64, stored=stored)
            if stored:
                self._registry.key_check.stored(replica, keys64)

    def _gap(self, message: BatchedKVOperationMsg, worker: LmcacheWorker) -> None:
        """Request the keys of CPU RAM again; LMCache 0.5 does not send those of other locations."""
        self._counts["worker_gaps"] += 1
        if message.location == CPU:
            worker.wants_sync = "messages were missed"
        elif (replica := self._registry.followed(message)) is not None:
            self._fleet.forget_lower(replica, _tier_of(message.location))

    def _syncing(
        self, message: FullSyncBatchMsg | FullSyncEndMsg, now_s: float
    ) -> LmcacheWorker | None:
        """Return the worker whose current sync a message belongs to."""
        worker = self._registry.known(message, now_s)
        if worker is None:
            return None
        if worker.sync is None or worker.sync.start.sync_id != message.sync_id:
            self._counts["worker_late"] += 1
            return None
        return worker

    def _end_sync(self, worker: LmcacheWorker, sync: FullSync) -> None:
        if sync.is_complete and not sync.counted:
            sync.counted = True
            self._counts["worker_synced"] += 1
            worker.wants_sync = None
