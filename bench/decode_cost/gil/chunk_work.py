"""What the engine's threads do with one chunk, each kind as a call that can be repeated."""

import mmap
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from bench.engine.redis_tier import server as redis_server
from bench.ttft import BenchError
from cacheengine.tiers import GetOutcome, PutOutcome
from cacheengine.tiers.disk.chunk_file import ChunkFile
from cacheengine.tiers.remote import RemoteTier
from cacheengine.tiers.serde import SERDE_NAMES, make_serde
from cacheengine.tiers.stores.hosted.client_process import SharedMemory
from cacheengine.tiers.stores.redis import RedisServer, RedisStore
from cacheengine.transfer.channel import Channel
from cacheengine.transfer.proofs import Checksums, ChunkProofs, KeyedDigests
from cacheengine.transfer.protocol import receive_chunk, send_chunk

Work = Callable[[], object]

_KEY: Final = b"k" * 32
_FINGERPRINT: Final = "f" * 32
_DTYPE: Final = "bfloat16"
_TIMEOUT_S: Final = 60.0


def chunk_work(chunk_bytes: int, directory: Path, stack: ExitStack) -> Mapping[str, Work]:
    """Return every kind by name; what they need is undone with ``stack``."""
    source, target = _kv(chunk_bytes), memoryview(mmap.mmap(-1, chunk_bytes))
    work = {**_disk(directory, source, target), **_hosted(source, target)}
    port = stack.enter_context(redis_server())
    for name in SERDE_NAMES:
        work |= stack.enter_context(_redis(port, name, source, target))
    for name, proofs in (("checksum", Checksums()), ("fleet secret", KeyedDigests(_KEY))):
        work |= stack.enter_context(_transfer(name, proofs, source, target))
    return work


def _kv(chunk_bytes: int) -> memoryview:
    """Return numbers as KV has them: normal ones, in bfloat16."""
    seed = random.Random(1).getrandbits(64)
    numbers = np.random.default_rng(seed).standard_normal(chunk_bytes // 2, np.float32)
    memory = memoryview(mmap.mmap(-1, chunk_bytes))
    np.copyto(np.frombuffer(memory, "<u2"), (numbers.view(np.uint32) >> 16).astype("<u2"))
    return memory


def _disk(directory: Path, source: memoryview, target: memoryview) -> Mapping[str, Work]:
    file = ChunkFile(_FINGERPRINT, len(source))
    path = directory / "chunk"

    def write() -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            file.write(fd, _KEY, source)
        finally:
            os.close(fd)

    def read() -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            if not file.read(fd, _KEY, target, may_be_direct=False):
                raise BenchError("a file is not the one that was written")
        finally:
            os.close(fd)

    return {"written to disk": write, "read from disk": read}


@contextmanager
def _redis(
    port: int, serde: str, source: memoryview, target: memoryview
) -> Iterator[Mapping[str, Work]]:
    store = RedisStore(RedisServer(host="127.0.0.1", port=port, connections=2, timeout_s=60))
    tier = RemoteTier(store, _FINGERPRINT, len(source), make_serde(serde, _DTYPE))

    def put() -> None:
        if tier.put(_KEY, source) is not PutOutcome.STORED:
            raise BenchError("Redis did not take a chunk")

    def get() -> None:
        if tier.get(_KEY, target) is not GetOutcome.OK:
            raise BenchError("Redis did not give a chunk back")

    try:
        yield {f"stored in Redis, {serde}": put, f"read from Redis, {serde}": get}
    finally:
        tier.delete([_KEY])
        tier.close()


@contextmanager
def _transfer(
    name: str, proofs: ChunkProofs, source: memoryview, target: memoryview
) -> Iterator[Mapping[str, Work]]:
    """Yield a copy between two threads: the longest hold is that of either side."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ends = [socket.create_connection(listening.getsockname()), listening.accept()[0]]
    channels = [Channel(each, _TIMEOUT_S) for each in ends]

    def copy() -> None:
        sender = threading.Thread(target=send_chunk, args=(channels[0], _KEY, source, proofs))
        sender.start()
        receive_chunk(channels[1], _KEY, target, proofs)
        sender.join()

    try:
        yield {f"copied to a peer, {name}": copy}
    finally:
        for channel in channels:
            channel.close()


def _hosted(source: memoryview, target: memoryview) -> Mapping[str, Work]:
    memory = SharedMemory(len(source))
    encoded = bytes(source)
    return {
        "to a library's process": lambda: memory.write(0, [source]),
        "to a library's process, encoded": lambda: memory.write(0, [encoded]),
        "from a library's process": lambda: memory.read(0, [target], len(target)),
    }
