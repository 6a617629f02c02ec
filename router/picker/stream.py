"""One call as a stream of messages, which may end while its request is being placed."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError
from grpc import aio

from router.picker.words import Message

T = TypeVar("T")

_OVER: Final = "the gateway has ended the request"


class Stream:
    """The messages of one call; `close` must be called at its end."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._reading: asyncio.Task[Message | None] | None = None
        """A message that is being waited for already."""
        self.is_broken = False
        """Whether a message came that is none of the protocol: the call ends there."""

    async def read(self) -> Message | None:
        """Return the next message, None at the call's end."""
        reading, self._reading = self._reading, None
        return await (self._next() if reading is None else reading)

    async def _next(self) -> Message | None:
        try:
            message = await self._context.read()
        except DecodeError:
            self.is_broken = True
            return None
        if message is aio.EOF:
            return None
        if message.WhichOneof("request") is None:
            self.is_broken = True
            return None
        return message

    async def must_read(self, *kinds: str) -> Message:
        """Return the next message, one of these kinds.

        Raises ConnectionResetError where there is none: the gateway has ended the call, or
        answers the request itself, as one whose body is too large.
        """
        message = await self.read()
        if message is None or message.WhichOneof("request") not in kinds:
            raise ConnectionResetError(_OVER)
        return message

    async def write(self, message: Message) -> None:
        """Send a message."""
        await self._context.write(message)

    async def unless_ended(self, placing: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; raise ConnectionResetError where the call ends before.

        When a client leaves, its gateway ends the call: the request must not be held any more.
        All of the request has been told, so any message means that the gateway answers it itself.
        """
        task = asyncio.create_task(placing)
        self._reading = asyncio.create_task(self._next())
        try:
            await asyncio.wait({task, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ConnectionResetError(_OVER)
            return task.result()
        finally:
            # Also of one that is done: the call may be cancelled before its error was asked for.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Wait for no more messages."""
        if self._reading is not None:
            self._reading.cancel()
