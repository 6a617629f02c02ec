"""An engine without vLLM, to copy from and to: `python -m bench.decode_cost.peer '{...}'`.

Says a line when it serves, and ends when its standard input closes.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import orjson

from bench.stress.inside.content import content, prefix_keys
from cacheengine.agent import Agent
from cacheengine.engine import CacheEngine
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import TransferMeter
from cacheengine.settings import EngineConfig
from cacheengine.transfer import TransferServer
from cacheengine.wire import ReplicaIdentity

HOST: Final = "127.0.0.1"
_CONVERSATION: Final = 0


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
    """That it holds from the start (`own_keys`), and has room for as many of the replica's."""
    agent_port: int
    transfer_port: int


class _Layout(ChunkLayout):
    """Another engine's layout, known by its fingerprint alone."""

    def fingerprint(self) -> str:
        """Return what stands for the model's name."""
        return self.model


def own_keys(chunks: int) -> list[bytes]:
    """Return the keys of the chunks that the peer has made up."""
    return prefix_keys(_CONVERSATION, chunks)


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
    config = EngineConfig(
        lmcache_instance_id="peer", lmcache_worker_port=told.agent_port, agent_host=HOST
    )
    with ExitStack() as undo:
        engine = CacheEngine(config, layout, Pool.allocate(2 * told.chunks + 2, told.chunk_bytes))
        undo.callback(engine.close)
        _store(engine, own_keys(told.chunks))
        meter = TransferMeter()
        server = TransferServer(engine, (HOST, told.transfer_port), meter)
        undo.callback(server.stop)
        server.start()
        agent = Agent(engine, _identity(told), config, meter)
        undo.callback(agent.stop)
        agent.start()
        print("serves", flush=True)
        sys.stdin.read()


def _store(engine: CacheEngine, keys: list[bytes]) -> None:
    reservation = engine.prepare_store(keys)
    assert reservation is not None
    for key, slot in zip(reservation.keys, reservation.slots, strict=True):
        view = engine.view(slot)
        view[:] = content(key, len(view))
    engine.complete_store(reservation.keys)
    # What is copied here for a while is not to drive these out.
    assert engine.pin(keys, "cpu") == len(keys)


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
