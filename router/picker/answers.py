"""What our own Envoy's access log tells of answers: many requests in one message.

Messages: ``envoy.service.accesslog.v3`` and ``envoy.data.accesslog.v3``.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from envoy.data.accesslog.v3.accesslog_pb2 import DownstreamEnd
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from google.protobuf.message import DecodeError
from grpc import StatusCode

from router.config import host_port
from router.envoy import ASKED_METADATA, ENVELOPE, EXCHANGE, FIRST_BYTE_US, KIND, OWN_METADATA
from router.picker.words import Message, metadata_of
from router.record import Outcome
from warmroute_common.tasks import end_all

_US: Final = 1e-6
_NS: Final = 1e-9
_MOST_DIGITS: Final = 18
"""Of microseconds; Python converts no number of thousands of digits."""
_STREAMED: Final = "text/event-stream"


@dataclass(frozen=True, kw_only=True)
class Told:
    """One answer as it stood when Envoy told of it."""

    exchange: str
    status: int
    """0 where it had not begun."""
    served: str | None
    """The endpoint that gave it; None where Envoy gave it itself."""
    first_byte_after_s: float | None
    """From when the picker was asked to the first byte of the body; of streamed answers only."""
    ended_after_s: float | None
    """The same, to when its last byte was sent on."""
    envelope: bytes
    """Of the body, the parts that `UsageReader` reads."""
    response_bytes: int
    outcome: Outcome | None
    """None while the answer is under way."""


class AnswersLog:
    """Serves ``envoy.service.accesslog.v3.AccessLogService``."""

    def __init__(self, note: Callable[[Told], Awaitable[None]]) -> None:
        """``note`` is called for each answer that is told of, in their order."""
        self._note = note
        self._readers: set[asyncio.Task[None]] = set()
        """One for each Envoy that is connected."""

    async def StreamAccessLogs(  # noqa: N802  (the protocol's name)
        self, messages: AsyncIterator[Message], context: Any
    ) -> Message:
        """Read one Envoy's log to its end, or ours."""
        # A task apart: a call that is itself cancelled is never over for gRPC's server.
        reader = asyncio.create_task(self._read(messages), name="Envoy's log")
        self._readers.add(reader)
        try:
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.result()
        except DecodeError:
            await context.abort(StatusCode.INVALID_ARGUMENT, "that is no StreamAccessLogsMessage")
        finally:
            self._readers.discard(reader)
            reader.cancel()
        return StreamAccessLogsResponse()

    async def _read(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            for entry in message.http_logs.log_entry:
                if (told := read(entry)) is not None:
                    await self._note(told)

    async def end(self) -> None:
        """Read no further: an Envoy keeps its log open for as long as it lives."""
        await end_all([*self._readers])


def read(entry: Message) -> Told | None:
    """Return what an ``HTTPAccessLogEntry`` tells; None for a request that was not picked for."""
    common, response = entry.common_properties, entry.response
    exchange = metadata_of(common.metadata, ASKED_METADATA, EXCHANGE)
    if exchange is None:
        return None
    is_streamed = response.response_headers.get(KIND, "").startswith(_STREAMED)
    is_over = common.access_log_type == DownstreamEnd
    return Told(
        exchange=exchange,
        status=response.response_code.value,
        served=_served(common),
        first_byte_after_s=_first_byte_after_s(common) if is_streamed else None,
        ended_after_s=_ended_after_s(common) if is_over else None,
        envelope=(metadata_of(common.metadata, OWN_METADATA, ENVELOPE) or "").encode(
            errors="replace"
        ),
        response_bytes=response.response_body_bytes,
        outcome=_outcome(common) if is_over else None,
    )


def _served(common: Message) -> str | None:
    address = common.upstream_remote_address.socket_address
    return host_port(address.address, address.port_value) if address.address else None


def _first_byte_after_s(common: Message) -> float | None:
    """Return a duration by Envoy's clock alone, which may be another than the picker's."""
    told_us = common.custom_tags.get(FIRST_BYTE_US, "")
    if not told_us.isdecimal() or len(told_us) > _MOST_DIGITS:
        return None
    return int(told_us) * _US


def _ended_after_s(common: Message) -> float | None:
    """Return the same to the answer's end, None where that was cut."""
    if not common.HasField("time_to_last_downstream_tx_byte"):
        return None
    asked, ended = common.time_to_last_rx_byte, common.time_to_last_downstream_tx_byte
    return max(0.0, float(ended.seconds - asked.seconds + (ended.nanos - asked.nanos) * _NS))


def _outcome(common: Message) -> Outcome:
    flags = common.response_flags
    if flags.downstream_connection_termination:
        return Outcome.CLIENT_GONE
    if flags.upstream_connection_termination or flags.stream_idle_timeout:
        return Outcome.CUT
    return Outcome.OK
