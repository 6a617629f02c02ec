"""Simulated replicas in this process that pull KV from each other, and can be killed."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from cacheengine.launch.vllm_launch import free_ports
from simulator.engine_storage import HASH_ALGORITHM
from simulator.nixl import NixlNetwork
from simulator.openai_prompts import Prompts, make_tokenizer, text_of
from simulator.openai_server import CallReader, OpenAiServer, serve_app
from simulator.simulated_replica import SimulatedReplica
from simulator.simulator_settings import SimulatorSettings
from warmroute_common.keys import HashScheme


@dataclass
class NixlReplica:
    """One replica, which `kill` ends as SIGKILL does, and `start` starts again at its port."""

    name: str
    settings: SimulatorSettings
    reader: CallReader
    network: NixlNetwork
    port: int
    """None that the kernel gives to somebody else while the replica is away."""
    url: str = ""
    simulated: SimulatedReplica = field(init=False)
    runner: web.AppRunner = field(init=False)

    async def start(self) -> None:
        self.simulated = SimulatedReplica(self.settings, self.name, nixl=self.network)
        self.simulated.start(0.0)
        app = OpenAiServer(self.simulated, self.reader).app()
        self.runner, self.url = await serve_app(app, "127.0.0.1", self.port)

    async def kill(self) -> None:
        assert self.runner.server is not None
        for each in self.runner.sites:
            await each.stop()
        # What was lent can be pulled no more from the moment on in which connections break.
        if self.simulated.nixl is not None:
            self.simulated.nixl.close()
            self.simulated.nixl = None
        for connection in list(self.runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()
        await self.simulated.stop()

    def cut_side_channel(self) -> Callable[[], None]:
        """Let nobody pull from it, while it answers requests; return what ends that."""
        nixl = self.simulated.nixl
        assert nixl is not None
        del self.network.connectors[nixl.engine_id]

        def restore() -> None:
            if self.simulated.nixl is nixl:
                self.network.connectors[nixl.engine_id] = nixl

        return restore

    @property
    def is_clean(self) -> bool:
        """Whether no request holds anything, and nothing is lent."""
        model, nixl = self.simulated.model, self.simulated.nixl
        model.check()
        return not (model.cache.held_blocks or model.lent or nixl)


@dataclass
class NixlFleet:
    replicas: Sequence[NixlReplica]
    prompts: Prompts

    def answer(self, text: str, tokens: int) -> str:
        """Return the right answer to a prompt."""
        return text_of(self.prompts.of_text(text, tokens).output_ids)


@asynccontextmanager
async def nixl_fleet(directory: Path, replicas: int, **settings: Any) -> AsyncIterator[NixlFleet]:
    given = SimulatorSettings(
        directory=directory,
        replicas=replicas,
        cpu_tokens=8192,
        disk_tokens=0,
        nixl=True,
        **settings,
    )
    make_tokenizer(given.tokenizer_directory)
    shape = given.shape
    prompts = Prompts(HashScheme(HASH_ALGORITHM), shape.block_tokens, shape.blocks_per_chunk)
    reader, network = CallReader(given, prompts), NixlNetwork()
    fleet = [
        NixlReplica(f"sim{at}", given, reader, network, port)
        for at, port in enumerate(free_ports(replicas))
    ]
    for each in fleet:
        await each.start()
    try:
        yield NixlFleet(fleet, prompts)
    finally:
        for each in fleet:
            await each.kill()
    assert not network.connectors
