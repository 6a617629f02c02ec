"""Calls to LMCache's workers: one ZeroMQ request and its answer each.

What goes wrong becomes the `ApiError` that the controller's caller gets, with the worker's name.
"""

import asyncio
import uuid
from typing import Final, TypeVar

import msgspec
import zmq
import zmq.asyncio

from router.config import join_host_port
from router.lmcache.workers import words
from router.lmcache.workers.worker import Worker
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.api_errors import UpstreamFailedError, UpstreamTimeoutError

MAX_CALLS: Final = 64
"""At once; more wait for their turn."""
ANSWER_S: Final = 5.0
MOVE_S: Final = 60.0
"""A worker answers when the bytes have arrived."""
_CONNECT_S: Final = 2.0
_LONGEST_ERROR: Final = 500

_ANSWER: Final = msgspec.msgpack.Decoder(words.Answer)
_T = TypeVar("_T", bound=words.Answer)


class WorkerCalls:
    """Calls over sockets of their own: a request that got no answer blocks the next one's."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def ask(
        self, worker: Worker, call: words.ToWorker, kind: type[_T], *, within_s: float | None = None
    ) -> _T:
        """Return a worker's answer, which is to be a ``kind``; raise `ApiError`.

        It is waited for `ANSWER_S`, or ``within_s``.
        """
        within_s = ANSWER_S if within_s is None else within_s
        about = f"worker {worker.call.worker_id} of '{worker.call.instance_id}'"
        try:
            async with self._turns, asyncio.timeout(within_s):
                frame = await self._exchange(worker, msgspec.msgpack.encode(call))
            answer = _ANSWER.decode(frame)
        except TimeoutError:
            raise UpstreamTimeoutError(f"{about} has not answered within {within_s:g} s") from None
        except (zmq.ZMQError, *UNREADABLE) as error:
            raise UpstreamFailedError(f"{about}: {error}") from None
        if isinstance(answer, words.ErrorMsg):
            raise UpstreamFailedError(f"{about}: {answer.error}"[:_LONGEST_ERROR])
        if not isinstance(answer, kind):
            raise UpstreamFailedError(f"{about} has answered with a {type(answer).__name__}")
        return answer

    async def _exchange(self, worker: Worker, frame: bytes) -> bytes:
        with self._context.socket(zmq.REQ, socket_class=zmq.asyncio.Socket) as socket:
            socket.linger = 0
            socket.ipv6 = ":" in worker.call.ip
            socket.connect(f"tcp://{join_host_port(worker.call.ip, worker.call.port)}")
            await socket.send(frame)
            answer: bytes = await socket.recv()
            return answer


async def is_listening(worker: Worker) -> bool:
    """Whether a worker's port takes connections; its process has ended if not."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(worker.call.ip, worker.call.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def event_id(kind: str) -> str:
    """Return an id that a worker calls what it is asked by."""
    return f"{kind}{uuid.uuid4()}"
