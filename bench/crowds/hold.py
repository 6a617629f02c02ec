"""The process that holds a crowd: ``python -m bench.crowds.hold NAME URL COUNT``.

It prints a line when all connections are there, and goes when its input ends; then it prints how
many of them the router had closed.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import uvloop

from bench.crowds.kinds import KINDS, Kind

_AT_ONCE: Final = 100
_RECEIVE_BYTES: Final = 4096
_EVERY_S: Final = 5.0
"""Between two bytes of a slow body."""


async def hold(kind: Kind, url: str, count: int) -> None:
    """Open the crowd, say so, and hold it until the input ends."""
    turns = asyncio.Semaphore(_AT_ONCE)
    parts = urlsplit(url)
    members = await asyncio.gather(
        *(_join(kind, (str(parts.hostname), int(parts.port or 0)), turns) for _ in range(count))
    )
    going_on = asyncio.create_task(_go_on(kind, members))
    print(json.dumps({"connections": len(members)}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    going_on.cancel()
    print(json.dumps({"closed": sum(map(_is_closed, members))}), flush=True)
    for each in members:
        each.close()


async def _join(kind: Kind, address: tuple[str, int], turns: asyncio.Semaphore) -> socket.socket:
    """Connect and send what comes first; of what is answered nothing is ever read."""
    loop = asyncio.get_running_loop()
    async with turns:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        await loop.sock_connect(made, address)
        await loop.sock_sendall(made, kind.first)
        return made


async def _go_on(kind: Kind, members: Sequence[socket.socket]) -> None:
    """Have each member send a byte now and then, all of them evenly spread."""
    while kind.later:
        for each in members:
            with suppress(OSError):
                each.send(kind.later)
            await asyncio.sleep(_EVERY_S / len(members))


def _is_closed(member: socket.socket) -> bool:
    try:
        return member.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> int:
    """Hold the crowd that the arguments name; return the exit code."""
    name, url, count = sys.argv[1:]
    (kind,) = (each for each in KINDS if each.name == name)
    uvloop.run(hold(kind, url, int(count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
