"""A router in front of real vLLM servers. Its decisions may be scripted."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config.settings import ReplicaConfig, RouterConfig, TimeoutsConfig, TokenizerConfig
from router.record.records import RequestRecord
from tests.router.conftest import Running, run_router
from tests.router.proxy.helpers import prefilling_at

MODEL = "m"


@dataclass
class Routed:
    """A router. If it is scripted, each request goes to ``decoder``, prefilled by ``prefiller``."""

    router: Running
    client: aiohttp.ClientSession
    decoder: str = "one"
    prefiller: str | None = None

    async def ask(self, text: str, tokens: int = 16, **more: Any) -> tuple[str, RequestRecord]:
        """Return the text of an answer at temperature 0, and the record."""
        body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0, **more}
        async with self.client.post(f"{self.router.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if not more.get("stream"):
                said = (await response.json())["choices"][0]["text"]
            else:
                lines = [line async for line in response.content if line.startswith(b"data: {")]
                said = "".join(json.loads(each[6:])["choices"][0]["text"] for each in lines)
        return said, await self.router.record_of(response.headers["x-request-id"])


@asynccontextmanager
async def routed(
    replicas: Sequence[ReplicaConfig], model_dir: Path, monkeypatch: pytest.MonkeyPatch | None
) -> AsyncIterator[Routed]:
    """Start a router, whose decisions are scripted by ``monkeypatch`` if it is given."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        config = RouterConfig(
            port=0,
            replicas=tuple(replicas),
            tokenizer=TokenizerConfig(path=str(model_dir)),
            timeouts=TimeoutsConfig(health_interval_s=0.5),
        )
        made = Routed(await run_router(stack, config), client)
        if monkeypatch is not None:
            prefilling_at(
                monkeypatch,
                lambda decision, fleet: (
                    None if made.prefiller is None else fleet.replicas[made.prefiller]
                ),
                lambda: made.decoder,
            )
        yield made
