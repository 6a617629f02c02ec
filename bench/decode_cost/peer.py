"""An engine without vLLM, in a process of its own: `python -m bench.decode_cost.peer '{...}'`.

One is there to copy from and to. Another does what the engine inside vLLM does, with tiers of its
own, as a cache daemon would.

Says a line when it serves, and ends when its standard input closes.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from bench.stress.inside.content import content, prefix_keys
from bench.stress.inside.lock import measure_lock
from cacheengine.agent import Agent
from cacheengine.engine import CacheEngine
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import TransferMeter
from cacheengine.settings import EngineConfig, load_engine_config
from cacheengine.transfer import TransferServer
from warmroute_common.agent_protocol import ReplicaIdentity

HOST: Final = "127.0.0.1"
AT_PEER: Final = 0
ON_DISK: Final = 1
IN_STORE: Final = 2
"""The conversations of the chunks that are made up."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the peer is told: how the replica's chunks are, and where to listen."""

    layout: str
    """Fingerprint of the replica's chunk layout."""
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    chunks: int
    """Of a set."""
    conversations: Sequence[int]
    """What it holds from the start, a set of `own_keys` of each."""
    sets: int
    """That it has room for in its pool."""
    is_pinned: bool
    """Whether what it holds from the start stays in its pool."""
    agent_port: int
    transfer_port: int
    config: str | None = None
    """A file of settings, for its tiers."""


class _Layout(ChunkLayout):
    """Another engine's layout, known by its fingerprint alone."""

    def fingerprint(self) -> str:
        """Return what stands for the model's name."""
        return self.model


def own_keys(conversation: int, chunks: int) -> list[bytes]:
    """Return the keys of a set of chunks that such an engine has made up."""
    return prefix_keys(conversation, chunks)


def main() -> None:
    """Serve until the standard input closes."""
    told = Told(**orjson.loads(sys.argv[1]))
    layout = _Layout(
        model=told.layout,
        dtype="bfloat16",
        block_tokens=told.block_tokens,
        chunk_tokens=told.chunk_tokens,
        chunk_bytes=told.chunk_bytes,
    )
    config = _config(told)
    with ExitStack() as undo:
        pool = Pool.allocate(told.sets * told.chunks + 2, told.chunk_bytes)
        engine = CacheEngine(config, layout, pool)
        undo.callback(engine.close)
        # As that inside vLLM, so that both do the same.
        measure_lock(engine)
        for conversation in told.conversations:
            _store(engine, own_keys(conversation, told.chunks), pin=told.is_pinned)
        meter = TransferMeter()
        server = TransferServer(engine, (HOST, told.transfer_port), meter)
        undo.callback(server.stop)
        server.start()
        agent = Agent(engine, _identity(told), config, meter)
        undo.callback(agent.stop)
        agent.start()
        print("serves", flush=True)
        sys.stdin.read()


def _config(told: Told) -> EngineConfig:
    if told.config is not None:
        return load_engine_config(Path(told.config))
    return EngineConfig(
        lmcache_instance_id="peer", lmcache_worker_port=told.agent_port, agent_host=HOST
    )


def _store(engine: CacheEngine, keys: list[bytes], *, pin: bool) -> None:
    reservation = engine.prepare_store(keys)
    assert reservation is not None
    for key, slot in zip(reservation.keys, reservation.slots, strict=True):
        view = engine.view(slot)
        view[:] = content(key, len(view))
    engine.complete_store(reservation.keys)
    # What is copied here for a while is not to drive these out.
    assert not pin or engine.pin(keys, "cpu") == len(keys)


def _identity(told: Told) -> ReplicaIdentity:
    return ReplicaIdentity(
        instance_id="peer",
        model="peer",
        hash_algorithm=told.hash_algorithm,
        hash_seed=told.hash_seed,
        block_tokens=told.block_tokens,
        chunk_tokens=told.chunk_tokens,
        chunk_bytes=told.chunk_bytes,
        transfer_port=told.transfer_port,
    )


if __name__ == "__main__":
    main()
