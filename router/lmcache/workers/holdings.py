"""What LMCache's workers tell of their chunks, and what the fleet hears of it. Pure.

It goes straight into the fleet's index, as the lower tiers of their replica. Of an instance's
workers worker 0 is followed alone: all ranks store the same chunks at the same time, each its
part, in pools of equal size, so each holds what the others hold. What is unknown or late changes
nothing and is counted.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Final

from router.fleet import Fleet
from router.index import Tier
from router.lmcache.workers import words
from router.lmcache.workers.registry import Workers
from router.lmcache.workers.worker import Sync, Worker
from warmroute_common.keys import KEY64_MASK

_TIERS: Final[Mapping[str, Tier]] = {words.CPU: Tier.CPU, words.DISK: Tier.DISK}
LOCATIONS: Final[Mapping[Tier, str]] = {
    **{tier: location for location, tier in _TIERS.items()},
    Tier.REMOTE: words.REMOTE,
}


def tier_of(location: str) -> Tier:
    """Return the tier of a location; one that is not known is the slowest."""
    return _TIERS.get(location, Tier.REMOTE)


class Holdings:
    """Takes what registered workers tell."""

    def __init__(self, fleet: Fleet, workers: Workers) -> None:
        self._fleet = fleet
        self._workers = workers
        self._counts = workers.counts

    def operations(self, call: words.BatchedKVOperationMsg, now_s: float) -> None:
        """Take over what came and went."""
        if (worker := self._workers.known(call, now_s)) is None:
            return
        taken = worker.take(call.location, call.operations)
        if taken is None:
            self._counts["worker_malformed"] += 1
            return
        self._counts["worker_late"] += taken.late
        self._counts["worker_applied"] += len(taken.fresh)
        if taken.gap:
            self._missed(call, worker)
        for stored, run in groupby(taken.fresh, lambda each: each.op_type == "admit"):
            self._tell(call, call.location, [each.key for each in run], stored=stored)

    def sync_started(self, call: words.FullSyncStartMsg, now_s: float) -> words.FullSyncStartRetMsg:
        """Begin a location anew: all its keys will come."""
        if (worker := self._workers.known(call, now_s)) is None:
            error = "this worker is not registered here"
            return words.FullSyncStartRetMsg(sync_id=call.sync_id, accepted=False, error_msg=error)
        worker.begin_sync(call)
        if (replica := self._workers.followed(call)) is not None:
            self._fleet.forget_lower(replica, tier_of(call.location))
        return words.FullSyncStartRetMsg(sync_id=call.sync_id, accepted=True)

    def sync_batch(self, call: words.FullSyncBatchMsg, now_s: float) -> None:
        """Take over some of a location's keys."""
        if (worker := self._syncing(call, now_s)) is None or (sync := worker.sync) is None:
            return
        if call.batch_id >= sync.call.batch_count:
            self._counts["worker_malformed"] += 1
            return
        sync.received.add(call.batch_id)
        self._tell(call, sync.call.location, call.keys, stored=True)
        self._end_sync(worker, sync)

    def sync_ended(self, call: words.FullSyncEndMsg, now_s: float) -> None:
        """Note that all batches were sent."""
        if (worker := self._syncing(call, now_s)) is None or (sync := worker.sync) is None:
            return
        sync.ended = True
        self._end_sync(worker, sync)

    def sync_status(
        self, call: words.FullSyncStatusMsg, now_s: float
    ) -> words.FullSyncStatusRetMsg:
        """Say which batches have not come; of an unknown sync that it is over.

        Until it is over the worker stores nothing. One that began before a restart of the
        router could not be completed: another is asked for.
        """
        worker = self._workers.known(call, now_s)
        sync = None if worker is None else worker.sync
        if sync is None or sync.call.sync_id != call.sync_id:
            return words.FullSyncStatusRetMsg(
                sync_id=call.sync_id, is_complete=False, global_progress=0.0, can_exit_freeze=True
            )
        return words.FullSyncStatusRetMsg(
            sync_id=call.sync_id,
            is_complete=sync.is_complete,
            global_progress=len(sync.received) / sync.call.batch_count,
            can_exit_freeze=sync.is_complete,
            missing_batches=sync.missing(),
        )

    def peer_with(self, call: words.BatchedP2PLookupMsg, now_s: float) -> tuple[str, str, int, str]:
        """Return the other instance that has most of some chunks in CPU RAM, from the first on.

        As LMCache has it: instance, location, chunks, where it is reached; ("", "", 0, "") for
        none. Chunks of another model have the same hashes: only its own is looked at.
        """
        best = ("", "", 0, "")
        own = self._workers.replica_of(call.instance_id)
        if self._workers.known(call, now_s) is None or own is None:
            return best
        fleet, keys = self._fleet, [each & KEY64_MASK for each in call.hashes]
        for worker in self._workers.all():
            instance, number = worker.call.name
            replica, url = self._workers.replica_of(instance), worker.call.peer_init_url
            if replica is None or url is None or replica == own or number != call.worker_id:
                continue
            if fleet.replicas[replica].roots != fleet.replicas[own].roots:
                continue
            runs = fleet.index.runs(fleet.replicas[replica].slot, keys, 0)
            if runs and runs[0].tier is Tier.CPU and runs[0].stop > best[2]:
                best = (instance, words.CPU, runs[0].stop, url)
        return best

    # --- parts of the above

    def _tell(
        self, call: words.FromWorker, location: str, keys: list[int], *, stored: bool
    ) -> None:
        if (replica := self._workers.followed(call)) is not None:
            numbers = [each & KEY64_MASK for each in keys]
            self._fleet.change_lower(replica, tier_of(location), numbers, stored=stored)
            if stored:
                self._workers.agreement.stored(replica, numbers)

    def _missed(self, call: words.BatchedKVOperationMsg, worker: Worker) -> None:
        """Have the keys of CPU RAM sent anew; of other locations LMCache 0.5 sends none."""
        self._counts["worker_gaps"] += 1
        if call.location == words.CPU:
            worker.wants_sync = "messages were missed"
        elif (replica := self._workers.followed(call)) is not None:
            self._fleet.forget_lower(replica, tier_of(call.location))

    def _syncing(
        self, call: words.FullSyncBatchMsg | words.FullSyncEndMsg, now_s: float
    ) -> Worker | None:
        """Return the worker whose sync a message belongs to; None if that is another."""
        worker = self._workers.known(call, now_s)
        if worker is None:
            return None
        if worker.sync is None or worker.sync.call.sync_id != call.sync_id:
            self._counts["worker_late"] += 1
            return None
        return worker

    def _end_sync(self, worker: Worker, sync: Sync) -> None:
        if sync.is_complete and not sync.noted:
            sync.noted = True
            self._counts["worker_synced"] += 1
            worker.wants_sync = None
