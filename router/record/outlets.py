"""Where records of requests go besides the metrics: the request log, and traces if configured."""

import asyncio
from typing import TYPE_CHECKING, Self

from router.config.settings import RouterConfig, TracingConfig
from router.record.records import RequestRecord
from router.record.request_log import RequestLog
from warmroute_common.config_reader import ConfigError

if TYPE_CHECKING:
    from router.record.tracing import Traces


class Outlets:
    """Takes records within ``async with``."""

    def __init__(self, config: RouterConfig) -> None:
        self._log = RequestLog(config.request_log)
        self._tracing = config.tracing
        self._traces: Traces | None = None

    async def __aenter__(self) -> Self:
        """Open what records go to.

        Raises `ConfigError` where that cannot be: a file, or traces without the extra for them.
        """
        await asyncio.to_thread(self._log.start)
        try:
            if self._tracing is not None:
                self._traces = await asyncio.to_thread(_traces, self._tracing)
        except BaseException:
            await asyncio.to_thread(self._log.stop)
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Send off what waits, and end: within some seconds, whatever the other ends do."""
        traces = self._traces
        ends = [self._log.stop, *([] if traces is None else [traces.stop])]
        await asyncio.gather(*map(asyncio.to_thread, ends))

    def observe(self, record: RequestRecord) -> None:
        """Log and trace a request that has ended; does not wait."""
        self._log.write(record)
        if self._traces is not None:
            self._traces.take(record)

    def dropped(self) -> dict[str, int]:
        """Return how many records were not told, by where."""
        return {"request_log": self._log.dropped}


def _traces(config: TracingConfig) -> "Traces":
    # An extra of its own, which only traces need.
    try:
        from router.record.tracing import Traces  # noqa: PLC0415
    except ModuleNotFoundError as error:
        found = f"OpenTelemetry is not installed ({error.name} is missing)"
        fix = "install the extra: pip install 'warmroute[otel]'"
        raise ConfigError("tracing", "", found, fix) from None
    return Traces(config)
