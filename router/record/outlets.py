"""Where records of requests go beside the metrics: the request log, and traces where configured."""

import asyncio

from router.config import RouterConfig
from router.record.records import RequestRecord
from router.record.request_log import RequestLog


class Outlets:
    """Takes records between `start` and `stop`."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises `ConfigError` where traces are wanted and the extra for them is missing."""
        self._log = RequestLog(config.request_log)

    async def start(self) -> None:
        """Open what records go to; raise `ConfigError` where that cannot be."""
        await asyncio.to_thread(self._log.start)

    async def stop(self) -> None:
        """Send off what waits, and end: within some seconds, whatever the other ends do."""
        await asyncio.to_thread(self._log.stop)

    def take(self, record: RequestRecord) -> None:
        """Tell of a request that has ended; does not wait."""
        self._log.write(record)

    def dropped(self) -> dict[str, int]:
        """Return how many records were not told, by where."""
        return {"request_log": self._log.dropped}
