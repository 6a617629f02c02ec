"""LMCache's controller calls for LMCache inside vLLM: lookup, move and clear.

The controller's API calls this for instances whose workers have registered. What LMCache 0.5 cannot
do is refused by name. Sources: ``handle_request`` of ``v1/cache_controller/worker.py`` and the
backends of lmcache 0.5.6.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import zmq
import zmq.asyncio

from router.fleet.fleet import Fleet
from router.lmcache.worker_events import LOCATIONS
from router.lmcache.worker_protocol import (
    CPU,
    ClearWorkerMsg,
    ClearWorkerRetMsg,
    ErrorMsg,
    FromCalledWorker,
    MoveWorkerMsg,
    MoveWorkerRetMsg,
    ToWorker,
)
from router.lmcache.worker_registry import LEADER, LmcacheWorker, WorkerRegistry
from warmroute_common.addresses import join_host_port
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.api_errors import (
    ConflictError,
    NotFoundError,
    UpstreamFailedError,
    UpstreamTimeoutError,
)

MAX_CALLS: Final = 64
"""Calls at the same time; further ones wait."""
ANSWER_S: Final = 5.0
MOVE_S: Final = 60.0
"""A worker answers a move when the bytes have arrived."""
_CONNECT_S: Final = 2.0
_LONGEST_ERROR: Final = 500
_NO_SALTS: Final = "does not separate prompts by cache_salt: leave it out"

_ANSWER: Final[msgspec.msgpack.Decoder[FromCalledWorker]] = msgspec.msgpack.Decoder(
    FromCalledWorker
)
_T = TypeVar("_T", MoveWorkerRetMsg, ClearWorkerRetMsg)


class WorkerClient:
    """Calls workers; each call has a socket of its own: an unanswered one would block the next."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def call(
        self,
        worker: LmcacheWorker,
        message: ToWorker,
        kind: type[_T],
        *,
        within_s: float | None = None,
    ) -> _T:
        """Return a worker's answer; raise `ApiError` without one in ``within_s`` (`ANSWER_S`)."""
        within_s = ANSWER_S if within_s is None else within_s
        registration = worker.registration
        name = f"worker {registration.worker_id} of '{registration.instance_id}'"
        try:
            async with self._slots, asyncio.timeout(within_s):
                frame = await self._exchange(worker, msgspec.msgpack.encode(message))
            answer = _ANSWER.decode(frame)
        except TimeoutError:
            raise UpstreamTimeoutError(f"{name} has not answered within {within_s:g} s") from None
        except (zmq.ZMQError, *UNREADABLE) as error:
            raise UpstreamFailedError(f"{name}: {error}") from None
        if isinstance(answer, ErrorMsg):
            raise UpstreamFailedError(f"{name}: {answer.error}"[:_LONGEST_ERROR])
        if not isinstance(answer, kind):
            raise UpstreamFailedError(f"{name} has answered with a {type(answer).__name__}")
        return answer

    async def _exchange(self, worker: LmcacheWorker, frame: bytes) -> bytes:
        ip, port = worker.registration.ip, worker.registration.port
        with self._context.socket(zmq.REQ, socket_class=zmq.asyncio.Socket) as socket:
            socket.linger = 0
            socket.ipv6 = ":" in ip
            socket.connect(f"tcp://{join_host_port(ip, port)}")
            await socket.send(frame)
            answer: bytes = await socket.recv()
            return answer


async def is_listening(worker: LmcacheWorker) -> bool:
    """Whether a worker's port accepts connections; if not, its process has ended."""
    ip, port = worker.registration.ip, worker.registration.port
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(ip, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def unsupported(what: str, param: str | None = None) -> ConflictError:
    """Return the error for something that LMCache inside vLLM cannot do."""
    return ConflictError(f"LMCache 0.5 inside vLLM {what}", param=param, code="unsupported")


class WorkerControl:
    """Calls of unknown instances raise `NotFoundError`."""

    def __init__(self, fleet: Fleet, registry: WorkerRegistry, client: WorkerClient) -> None:
        self._fleet = fleet
        self._registry = registry
        self._client = client

    def instances(self) -> Sequence[str]:
        """Return the instances' ids."""
        return self._registry.instances()

    def listing(self, now_s: float) -> list[dict[str, Any]]:
        """Return the instances for ``GET /instances``."""
        registry = self._registry
        return [
            {
                "instance_id": each,
                "replica": registry.replica_of(each),
                "problem": registry.problems.get(each),
                "keys": registry.key_check.state(registry.replica_of(each)),
                "workers": [
                    {
                        "worker_id": number,
                        "ip": worker.registration.ip,
                        "port": worker.registration.port,
                        "heartbeats": worker.heartbeats,
                        "silent_s": round(now_s - worker.seen_s, 3),
                    }
                    for number, worker in registry.of(each).items()
                ],
            }
            for each in registry.instances()
        ]

    def lookup(
        self, tokens: Sequence[int], cache_salt: str | None
    ) -> tuple[dict[str, tuple[str, int]], dict[str, str]]:
        """Return what instances hold of a prompt, and for other instances why it is unknown.

        By instance: the location of the last chunk of the matched prefix, and the prefix's tokens.
        """
        found: dict[str, tuple[str, int]] = {}
        errors = dict(self._registry.problems)
        for instance in self.instances():
            replica = self._registry.replica_of(instance)
            keys = None if replica is None else self._fleet.replicas[replica].lmcache_keys
            if replica is None or keys is None:
                errors.setdefault(instance, f"its worker {LEADER} has not registered")
            elif cache_salt is not None:
                errors[instance] = unsupported(_NO_SALTS).message
            else:
                chunks = [int.from_bytes(each, "big") for each in keys.chain(tokens)]
                slot = self._fleet.replicas[replica].slot
                if runs := self._fleet.index.runs(slot, chunks, 0):
                    found[instance] = (LOCATIONS[runs[-1].tier], runs[-1].stop * keys.chunk_tokens)
        return found, errors

    async def clear(
        self, instance_id: str, locations: Sequence[str] | None, *, all_tokens: bool
    ) -> dict[str, int]:
        """Drop everything in CPU RAM; return the dropped tokens by location."""
        workers = self._found(instance_id)
        if not all_tokens:
            raise unsupported("clears whole locations, not a prompt's chunks", "tokens")
        if locations is None or set(locations) != {CPU}:
            raise unsupported(f"clears {CPU} alone: name that location", "location")
        message = ClearWorkerMsg(worker_event_id=_event_id("Clear"), location=CPU)
        answers = await asyncio.gather(
            *(self._client.call(each, message, ClearWorkerRetMsg) for each in workers.values())
        )
        return {CPU: min(each.num_tokens for each in answers)}

    async def move(
        self,
        source: tuple[str, str],
        target: tuple[str, str],
        tokens: list[int],
        cache_salt: str | None,
        *,
        copy: bool,
    ) -> int:
        """Move a prompt's chunks between instances; return how many tokens have arrived.

        ``source`` and ``target`` are an instance and a location each.
        """
        if cache_salt is not None:
            raise unsupported(_NO_SALTS, "cache_salt")
        senders = self._found(source[0], "old_position")
        receivers = self._found(target[0], "new_position")
        if source[0] == target[0]:
            raise unsupported("moves nothing between one instance's own locations", "new_position")
        if target[1] != CPU:
            raise unsupported(f"moves chunks to {CPU} alone", "new_position")
        if senders.keys() != receivers.keys():
            raise ConflictError(f"'{source[0]}' and '{target[0]}' have different workers")
        _peer_urls(source[0], senders)
        urls = _peer_urls(target[0], receivers)
        messages = [
            MoveWorkerMsg(
                worker_event_id=_event_id("Move"),
                old_position=source[1],
                new_position=(urls[number], target[1]),
                tokens=tokens,
                copy=copy,
            )
            for number in senders
        ]
        calls = [
            self._client.call(each, message, MoveWorkerRetMsg, within_s=MOVE_S)
            for each, message in zip(senders.values(), messages, strict=True)
        ]
        return min(each.num_tokens for each in await asyncio.gather(*calls))

    def _found(self, instance_id: str, param: str = "instance_id") -> Mapping[int, LmcacheWorker]:
        found = self._registry.of(instance_id)
        if not found:
            text = f"'{instance_id}' has no LMCache inside whose workers have registered"
            raise NotFoundError(text, param=param, code="unknown_instance")
        return found


def _peer_urls(instance_id: str, workers: Mapping[int, LmcacheWorker]) -> dict[int, str]:
    """Return where an instance's workers receive chunks; raise `ConflictError` without P2P."""
    urls = {number: each.registration.peer_init_url for number, each in workers.items()}
    known = {number: each for number, each in urls.items() if each is not None}
    if len(known) < len(urls):
        raise unsupported(f"moves chunks over P2P alone: set enable_p2p at '{instance_id}'")
    return known


def _event_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4()}"
