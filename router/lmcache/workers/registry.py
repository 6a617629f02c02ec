"""Which of LMCache's workers there are, and the replicas that they are inside of. Pure.

Times are passed in. An instance has a worker for each rank, of which worker 0 leads: an instance
without it has no replica.
"""

import logging
from collections import Counter
from typing import Final

from router.config import LmcacheWorkersConfig
from router.fleet import Fleet
from router.index import LmcacheKeys, PromptKeyCache
from router.lmcache.workers import words
from router.lmcache.workers.agreement import Agreement
from router.lmcache.workers.binding import bound
from router.lmcache.workers.worker import Worker
from warmroute_common.api_errors import ConflictError, OverloadedError

log = logging.getLogger("warmroute.lmcache")

MAX_WORKERS: Final = 1024
LEADER: Final = 0


class Workers:
    """The workers that have registered, at most `MAX_WORKERS`."""

    def __init__(self, fleet: Fleet, config: LmcacheWorkersConfig, counts: Counter[str]) -> None:
        self._fleet = fleet
        self._config = config
        self._workers: dict[tuple[str, int], Worker] = {}
        self._replica_of: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        """By instance why it has no replica."""
        self.counts = counts
        """What became of messages, by a word for each."""
        self.agreement = Agreement()
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._workers)

    def all(self) -> list[Worker]:
        """Return every worker."""
        return list(self._workers.values())

    def of(self, instance_id: str) -> dict[int, Worker]:
        """Return the workers of an instance by their ids, in their order."""
        found = {
            number: each for (name, number), each in self._workers.items() if name == instance_id
        }
        return dict(sorted(found.items()))

    def replica_of(self, instance_id: str) -> str | None:
        """Return the replica that an instance is inside of, if that is known."""
        return self._replica_of.get(instance_id)

    def asked(self, keyring: PromptKeyCache) -> None:
        """Note a prompt that will be sent to some replica."""
        followed = (self._fleet.replicas[each] for each in self._replica_of.values())
        self.agreement.asked(followed, keyring)

    def register(self, call: words.RegisterMsg, now_s: float, wall_s: float) -> None:
        """Take in a worker that has started: what was known of it is gone.

        Raises `ConflictError` for the name of a replica that has no LMCache inside, `OverloadedError`.
        """
        self._add(call, now_s, wall_s, from_start=True)

    def heartbeat(self, call: words.HeartbeatMsg, now_s: float, wall_s: float) -> str | None:
        """Note that a worker lives; return why it is to send all its keys, if it is.

        One that is not known has registered with a router that was here before. Raises as
        `register` does.
        """
        worker = self._workers.get(call.name)
        if worker is None or (worker.call.ip, worker.call.port) != (call.ip, call.port):
            worker = self._add(call, now_s, wall_s, from_start=False)
        worker.seen_s = now_s
        worker.heartbeats += 1
        return worker.sync_due(now_s) if self.followed(call) is not None else None

    def deregister(self, call: words.DeRegisterMsg) -> None:
        """Forget a worker that ends."""
        if self._workers.pop(call.name, None) is None:
            self._unknown(call)
            return
        log.info("LMCache worker %s:%d has left", *call.name)
        self._bind()

    def expire(self, now_s: float) -> None:
        """Forget the workers that have fallen silent."""
        limit_s = now_s - self._config.timeout_s
        silent = [name for name, each in self._workers.items() if each.seen_s < limit_s]
        for name in silent:
            log.warning("LMCache worker %s:%d is silent: forgotten", *name)
            self.counts["worker_silent"] += 1
            del self._workers[name]
        if silent:
            self._bind()

    def followed(self, call: words.FromWorker) -> str | None:
        """Return the replica whose tiers a worker tells of; None if it tells of none."""
        return self._replica_of.get(call.instance_id) if call.worker_id == LEADER else None

    def known(self, call: words.FromWorker, now_s: float) -> Worker | None:
        """Return the worker that has sent a message; None, counted, if it has not registered."""
        worker = self._workers.get(call.name)
        if worker is None:
            self._unknown(call)
        else:
            worker.seen_s = now_s
        return worker

    def replicas_changed(self, left: str | None = None) -> None:
        """Find the instances' replicas anew; ``left`` is about to leave the fleet."""
        for instance in [name for name, each in self._replica_of.items() if each == left]:
            del self._replica_of[instance]
        if left is not None:
            self.agreement.tied(left)
        self._bind(without=left)

    # --- parts of the above

    def _add(
        self, call: words.RegisterMsg, now_s: float, wall_s: float, *, from_start: bool
    ) -> Worker:
        self._check_name(call.instance_id)
        known = self._workers.get(call.name)
        if known is None and len(self._workers) >= MAX_WORKERS:
            raise OverloadedError(f"{MAX_WORKERS} workers have registered, no more may")
        log.info("LMCache worker %s:%d has registered from %s:%d", *call.name, call.ip, call.port)
        worker = self._workers[call.name] = Worker(
            call=call, registered_wall_s=wall_s, seen_s=now_s, from_start=from_start
        )
        if known is not None:
            self._succeed(known, worker)
        if not from_start:
            worker.wants_sync = "the controller has restarted"
        self._bind()
        return worker

    def _succeed(self, before: Worker, after: Worker) -> None:
        """Have a worker take the place of one that had its name."""
        if (replica := self.followed(after.call)) is not None:
            self._fleet.forget_lower(replica)
        # Two that beat in turn under one name must not be asked for their keys in turn.
        after.sync_asked_s = before.sync_asked_s
        old, new = ((each.call.ip, each.call.port) for each in (before, after))
        if old != new:
            log.warning(
                "LMCache worker %s:%d is at %s:%d now, and was at %s:%d: two instances must not "
                "have one lmcache_instance_id",
                *(*after.call.name, *new, *old),
            )

    def _check_name(self, instance_id: str) -> None:
        replica = self._fleet.replicas.get(instance_id)
        if replica is None or (replica.config.agent_url is None and replica.config.lmcache is None):
            return
        raise ConflictError(
            f"'{instance_id}' is a replica with an agent_url or an LMCache server, and LMCache "
            "inside vLLM claims that name: give it another lmcache_instance_id",
            code="name_taken",
        )

    def _bind(self, without: str | None = None) -> None:
        """Tie replicas to the instances inside them, as things are now."""
        fleet = self._fleet.replicas.items()
        replicas = {name: each.config for name, each in fleet if name != without}
        hosts = {name: each.call.ip for (name, of), each in self._workers.items() if of == LEADER}
        found, problems = bound(replicas, hosts)
        for instance, replica in list(self._replica_of.items()):
            if found.get(instance) != replica:
                del self._replica_of[instance]
                self._fleet.tie_lmcache(replica, None)
        for instance in found.keys() - self._replica_of.keys():
            self._tie(instance, found[instance], problems)
        for each in set(problems.values()) - set(self.problems.values()):
            log.warning("%s", each)
        self.problems = problems

    def _tie(self, instance: str, replica: str, problems: dict[str, str]) -> None:
        config = self._config
        try:
            keys = LmcacheKeys.inside(
                config.chunk_size,
                config.pre_caching_hash_algorithm,
                self._fleet.replicas[replica].config.hash_seed,
            )
        except ValueError as error:
            problems[instance] = f"what LMCache inside {replica} holds cannot be known: {error}"
            return
        self._replica_of[instance] = replica
        self._fleet.tie_lmcache(replica, keys)
        self.agreement.tied(replica)
        leader = self._workers[instance, LEADER]
        if leader.has_told:
            leader.wants_sync = "its replica was not clear"

    def _unknown(self, call: words.FromWorker) -> None:
        self.counts["worker_unknown"] += 1
        if call.instance_id not in self._warned and len(self._warned) < MAX_WORKERS:
            self._warned.add(call.instance_id)
            log.warning(
                "LMCache worker %s:%d has not registered here: its messages say nothing until its "
                "next heartbeat (is lmcache_worker_heartbeat_time set there?), or its restart",
                *call.name,
            )
