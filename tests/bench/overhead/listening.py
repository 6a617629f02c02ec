"""A server of a test, on a port of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def listening(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[str]:
    """Serve connections with such protocols for the time of the block; yield the URL."""
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()
