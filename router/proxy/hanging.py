"""Giving up a replica that is known to hang, before it has begun to answer."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from router.proxy.upstream import Answer, TryFailed
from router.record import Cause


async def unless_hung(
    hung: asyncio.Future[None] | None, sending: Coroutine[Any, Any, Answer]
) -> Answer:
    """Return the answer of `Upstream.send` unless ``hung`` is done before; then `TryFailed`.

    ``hung`` is None where nothing would tell.
    """
    if hung is None:
        return await sending
    task = asyncio.create_task(sending)
    either: set[asyncio.Future[Any]] = {task, hung}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    except asyncio.CancelledError:
        await _end(task)
        raise
    await _end(task)
    raise TryFailed(Cause.HUNG, "the LMCache server that it waits for has ended")


async def _end(task: asyncio.Task[Answer]) -> None:
    """Cancel a request; close its answer if that has come after all."""
    task.cancel()
    with suppress(asyncio.CancelledError, TryFailed):
        (await task).close()
