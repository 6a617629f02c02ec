"""LMCache's controller API for workers inside vLLM: what their protocol can do, and what not.

The router's controller calls it for the instances here. Sources: ``handle_request`` of
``v1/cache_controller/worker.py`` and the backends of lmcache 0.5.6.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.fleet import Fleet
from router.lmcache.workers import words
from router.lmcache.workers.calls import MOVE_S, WorkerCalls, event_id
from router.lmcache.workers.holdings import LOCATIONS
from router.lmcache.workers.registry import LEADER, Workers
from router.lmcache.workers.worker import Worker
from warmroute_common.api_errors import ApiError, ConflictError, NotFoundError

_UNREACHABLE: Final = -1001
"""LMCache's error code of a worker that answers with an error, or not at all."""
_NO_SALTS: Final = "keeps no cache_salt apart: ask without one"


def _unsupported(what: str, param: str | None = None) -> ConflictError:
    return ConflictError(f"LMCache 0.5 inside vLLM {what}", param=param, code="unsupported")


class WorkerControl:
    """The instances whose workers have registered; calls of unknown ones raise `NotFoundError`."""

    def __init__(self, fleet: Fleet, workers: Workers, calls: WorkerCalls) -> None:
        self._fleet = fleet
        self._workers = workers
        self._calls = calls

    def instances(self) -> Sequence[str]:
        """Return the instances' ids."""
        return list(dict.fromkeys(each.call.instance_id for each in self._workers.all()))

    def listing(self, now_s: float) -> list[dict[str, Any]]:
        """Return what ``GET /instances`` says of them."""
        return [
            {
                "instance_id": each,
                "replica": self._workers.replica_of(each),
                "problem": self._workers.problems.get(each),
                "keys": self._workers.agreement.state(self._workers.replica_of(each)),
                "workers": [
                    {
                        "worker_id": number,
                        "ip": worker.call.ip,
                        "port": worker.call.port,
                        "heartbeats": worker.heartbeats,
                        "silent_s": round(now_s - worker.seen_s, 3),
                    }
                    for number, worker in self._workers.of(each).items()
                ],
            }
            for each in self.instances()
        ]

    def worker_infos(
        self, instance_id: str, worker_ids: Sequence[int], since_wall_s: float
    ) -> list[dict[str, Any]]:
        """Return what ``/query_worker_info`` says of some workers, or of all; times since 1970."""
        found = self._found(instance_id)
        if strange := [each for each in worker_ids if each not in found]:
            raise NotFoundError(f"'{instance_id}' has no worker {strange[0]}", param="worker_ids")
        return [
            {
                "instance_id": instance_id,
                "worker_id": number,
                "ip": worker.call.ip,
                "port": worker.call.port,
                "peer_init_url": worker.call.peer_init_url,
                "registration_time": worker.registered_wall_s,
                "last_heartbeat_time": since_wall_s + worker.seen_s,
            }
            for number, worker in found.items()
            if not worker_ids or number in worker_ids
        ]

    def lookup(
        self, tokens: Sequence[int], cache_salt: str | None
    ) -> tuple[dict[str, tuple[str, int]], dict[str, str]]:
        """Return where the last of a prompt's leading chunks lies, and how many tokens these are.

        By instance, beside why that is not known of others.
        """
        found: dict[str, tuple[str, int]] = {}
        errors = dict(self._workers.problems)
        for instance in self.instances():
            replica = self._workers.replica_of(instance)
            keys = None if replica is None else self._fleet.replicas[replica].lmcache_keys
            if replica is None or keys is None:
                errors.setdefault(instance, f"its worker {LEADER} has not registered")
            elif cache_salt is not None:
                errors[instance] = _unsupported(_NO_SALTS).message
            else:
                chunks = [int.from_bytes(each, "big") for each in keys.chain(tokens)]
                slot = self._fleet.replicas[replica].slot
                if runs := self._fleet.index.runs(slot, chunks, 0):
                    found[instance] = (LOCATIONS[runs[-1].tier], runs[-1].stop * keys.chunk_tokens)
        return found, errors

    async def pin(
        self, instance_id: str, location: str, tokens: list[int], cache_salt: str | None
    ) -> int:
        """Have a prompt's chunks be kept, for LMCache's ``pin_timeout_sec``; return the tokens."""
        _check_salt(cache_salt)
        call = words.PinWorkerMsg(worker_event_id=event_id("Pin"), location=location, tokens=tokens)
        return await self._least_tokens(instance_id, call, words.PinWorkerRetMsg)

    async def unpin(
        self, instance_id: str, location: str, tokens: list[int], cache_salt: str | None
    ) -> int:
        """Refuse that."""
        raise _unsupported("unpins by itself, after its pin_timeout_sec, and not when asked")

    async def clear(
        self, instance_id: str, locations: Sequence[str] | None, *, all_tokens: bool
    ) -> dict[str, int]:
        """Drop all that is in CPU RAM; return the tokens by location."""
        self._found(instance_id)
        if not all_tokens:
            raise _unsupported("clears whole locations, not a prompt's chunks", "tokens")
        if locations is None or set(locations) != {words.CPU}:
            raise _unsupported(f"clears {words.CPU} alone: name that location", "location")
        call = words.ClearWorkerMsg(worker_event_id=event_id("Clear"), location=words.CPU)
        return {words.CPU: await self._least_tokens(instance_id, call, words.ClearWorkerRetMsg)}

    async def move(
        self,
        source: tuple[str, str],
        target: tuple[str, str],
        tokens: list[int],
        cache_salt: str | None,
        *,
        copy: bool,
    ) -> int:
        """Have an instance send a prompt's chunks to another one; return the tokens that arrived.

        Positions are instance and location.
        """
        _check_salt(cache_salt)
        senders = self._found(source[0], "old_position")
        takers = self._found(target[0], "new_position")
        if source[0] == target[0]:
            raise _unsupported("moves nothing between one instance's own locations", "new_position")
        if target[1] != words.CPU:
            raise _unsupported(f"moves chunks to {words.CPU} alone", "new_position")
        if senders.keys() != takers.keys():
            raise ConflictError(f"'{source[0]}' and '{target[0]}' have different workers")
        _peer_urls(source[0], senders)
        urls = _peer_urls(target[0], takers)
        calls = [
            words.MoveWorkerMsg(
                worker_event_id=event_id("Move"),
                old_position=source[1],
                new_position=(urls[number], target[1]),
                tokens=tokens,
                copy=copy,
            )
            for number in senders
        ]
        asked = [
            self._calls.ask(each, call, words.MoveWorkerRetMsg, within_s=MOVE_S)
            for each, call in zip(senders.values(), calls, strict=True)
        ]
        return min(each.num_tokens for each in await asyncio.gather(*asked))

    async def health(self, instance_id: str) -> tuple[dict[int, int], dict[int, str]]:
        """Return the error codes of an instance's workers, 0 for well ones; and what went wrong."""
        workers = self._found(instance_id)
        call = words.HealthWorkerMsg(worker_event_id=event_id("Health"))
        answers = await asyncio.gather(
            *(self._calls.ask(each, call, words.HealthWorkerRetMsg) for each in workers.values()),
            return_exceptions=True,
        )
        codes: dict[int, int] = {}
        errors: dict[int, str] = {}
        for number, answer in zip(workers, answers, strict=True):
            if isinstance(answer, ApiError):
                codes[number], errors[number] = _UNREACHABLE, answer.message
            elif isinstance(answer, BaseException):
                raise answer
            else:
                codes[number] = answer.error_code
        return codes, errors

    # --- parts of the above

    def _found(self, instance_id: str, param: str = "instance_id") -> Mapping[int, Worker]:
        found = self._workers.of(instance_id)
        if not found:
            text = f"'{instance_id}' has no LMCache inside whose workers have registered"
            raise NotFoundError(text, param=param, code="unknown_instance")
        return found

    async def _least_tokens(
        self, instance_id: str, call: words.ToWorker, kind: type[words.TokensMoved]
    ) -> int:
        """Ask all workers of an instance; return what each of them has done at least."""
        asked = (self._calls.ask(each, call, kind) for each in self._found(instance_id).values())
        return min(each.num_tokens for each in await asyncio.gather(*asked))


def _check_salt(cache_salt: str | None) -> None:
    if cache_salt is not None:
        raise _unsupported(_NO_SALTS, "cache_salt")


def _peer_urls(instance_id: str, workers: Mapping[int, Worker]) -> dict[int, str]:
    """Return where an instance's workers take chunks; raise `ConflictError` where they take none."""
    urls = {number: each.call.peer_init_url for number, each in workers.items()}
    known = {number: each for number, each in urls.items() if each is not None}
    if len(known) < len(urls):
        raise _unsupported(f"moves chunks over P2P alone: set enable_p2p at '{instance_id}'")
    return known
