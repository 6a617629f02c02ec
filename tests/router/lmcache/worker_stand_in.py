"""A worker of LMCache inside vLLM whose every message a test writes, as they are on the wire."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"


@dataclass
class WorkerStandIn:
    """A worker of lmcache 0.5.6, as far as a controller sees it; made by `standing_in`."""

    instance_id: str
    worker_id: int
    context: zmq.asyncio.Context
    push_socket: zmq.asyncio.Socket
    ask_socket: zmq.asyncio.Socket
    port: int
    peer_init_url: str | None = None
    ip: str = "127.0.0.1"
    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """By the type of a call; None: none comes."""
    called: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    heartbeat_url: str = ""
    serving: asyncio.Task[None] | None = None

    async def register(self) -> dict[str, Any]:
        answer = await self.ask("RegisterMsg", **self._address())
        if answer["type"] == "RegisterRetMsg":
            self.heartbeat_url = answer["extra_config"]["heartbeat_url"]
        return answer

    async def beat(self, url: str = "") -> dict[str, Any]:
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"tcp://{url or self.heartbeat_url}")
            return await self._exchange(socket, "HeartbeatMsg", self._address())

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        return await self._exchange(self.ask_socket, kind, fields)

    async def push(self, kind: str, **fields: Any) -> None:
        await self.push_socket.send_multipart([msgspec.msgpack.encode(self._of(kind, fields))])

    async def tell(
        self, op_type: str, keys: Sequence[int], location: str = CPU, *, skipped: int = 0
    ) -> None:
        """Tell of chunks as its next operations, after ``skipped`` that are not sent."""
        start = self.numbers.get(location, 0) + skipped
        self.numbers[location] = start + len(keys)
        operations = [
            {"op_type": op_type, "key": key, "seq_num": number}
            for number, key in enumerate(keys, start)
        ]
        await self.push("BatchedKVOperationMsg", location=location, operations=operations)

    def _address(self) -> dict[str, Any]:
        return {"ip": self.ip, "port": self.port, "peer_init_url": self.peer_init_url}

    def _of(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": kind,
            "instance_id": self.instance_id,
            "worker_id": self.worker_id,
            **fields,
        }

    async def _exchange(
        self, socket: zmq.asyncio.Socket, kind: str, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        await socket.send_multipart([b"", msgspec.msgpack.encode(self._of(kind, fields))])
        answer: dict[str, Any] = msgspec.msgpack.decode((await socket.recv_multipart())[-1])
        return answer

    async def serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            call = msgspec.msgpack.decode(await socket.recv())
            self.called.append(call)
            default = {"type": call["type"].replace("Msg", "RetMsg"), "num_tokens": 0}
            answer = self.answers.get(call["type"], default)
            if answer is None:
                await asyncio.Event().wait()
            await socket.send(msgspec.msgpack.encode(answer))


@contextlib.asynccontextmanager
async def working(
    ports: Mapping[str, int], instance_id: str = "two", worker_id: int = 0, **fields: Any
) -> AsyncIterator[WorkerStandIn]:
    """Run one for the block; it has not registered."""
    context = zmq.asyncio.Context()
    calls = context.socket(zmq.REP)
    port = calls.bind_to_random_port("tcp://127.0.0.1")
    push, ask = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
    push.connect(f"tcp://127.0.0.1:{ports['pull_port']}")
    ask.connect(f"tcp://127.0.0.1:{ports['reply_port']}")
    made = WorkerStandIn(instance_id, worker_id, context, push, ask, port, **fields)
    made.serving = asyncio.create_task(made.serve(calls))
    try:
        yield made
    finally:
        made.serving.cancel()
        await asyncio.gather(made.serving, return_exceptions=True)
        context.destroy(linger=0)
