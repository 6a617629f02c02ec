"""An engine with its agent and its transfer server, as `WarmrouteSpec` puts them together."""

import msgspec

from cacheengine.agent.agent import Agent
from cacheengine.record import TransferMeter
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.transfer.transfer_server import TransferServer
from tests.cacheengine.helpers import CHUNK_BYTES, Bench
from warmroute_common.agent_protocol import ReplicaIdentity
from warmroute_common.fleet_secret import FleetSecret


def identity(name: str) -> ReplicaIdentity:
    return ReplicaIdentity(
        instance_id=name,
        model="m",
        hash_algorithm="sha256",
        hash_seed="seed",
        block_tokens=16,
        chunk_tokens=256,
        chunk_bytes=CHUNK_BYTES,
    )


class WholeReplica:
    """All of a replica but the model, in this process; runs from now to `stop`."""

    def __init__(self, name: str, bench: Bench, secret: FleetSecret | None = None) -> None:
        self.bench = bench
        self.meter = TransferMeter()
        self.server = TransferServer(bench.engine, ("127.0.0.1", 0), self.meter, secret=secret)
        self.server.start()
        assert self.server.address is not None
        named = msgspec.structs.replace(identity(name), transfer_port=self.server.address[1])
        port = EngineConfig(lmcache_worker_port=0, fleet_secret=secret)
        self.agent = Agent(bench.engine, named, port, self.meter)
        self.agent.start()
        assert self.agent.address is not None
        self.url = "http://{}:{}".format(*self.agent.address)
        self.address = "{}:{}".format(*self.server.address)

    def stop(self) -> None:
        """End the servers; nothing may be held or pinned by them then.

        What is on its way from disk then, for a prefetch that nobody waits for any more, is held
        until it is there.
        """
        self.agent.stop()
        self.server.stop()
        self.bench.finish_reads()
        self.bench.engine.expire_pins()
        assert self.held() == 0
        self.bench.engine.check()

    def held(self) -> int:
        """Return how many bytes are in use an hour later."""
        self.bench.clock.advance(3600)
        self.bench.finish_puts()
        return self.bench.engine.stats().cpu_held_bytes
