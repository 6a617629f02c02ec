"""What our own Envoy's access log tells of answers: many requests in one message.

Messages: ``envoy.service.accesslog.v3`` and ``envoy.data.accesslog.v3``.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from envoy.data.accesslog.v3.accesslog_pb2 import DownstreamEnd
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from google.protobuf.message import DecodeError
from grpc import StatusCode

from router.config import host_port
from router.envoy import END_US, ENVELOPE, EXCHANGE, FIRST_BYTE_US, KIND
from router.picker.words import Message
from router.record import Outcome

_US: Final = 1e-6
_MOST_DIGITS: Final = 18
"""Of microseconds; Python converts no number of thousands of digits."""
_STREAMED: Final = "text/event-stream"
_NOTHING: Final = "-"
"""What Envoy says where there is nothing to say."""


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

    async def StreamAccessLogs(  # noqa: N802  (the protocol's name)
        self, messages: AsyncIterator[Message], context: Any
    ) -> Message:
        """Read one Envoy's log to its end."""
        try:
            async for message in messages:
                for entry in message.http_logs.log_entry:
                    if (told := read(entry)) is not None:
                        await self._note(told)
        except DecodeError:
            await context.abort(StatusCode.INVALID_ARGUMENT, "that is no StreamAccessLogsMessage")
        return StreamAccessLogsResponse()


def read(entry: Message) -> Told | None:
    """Return what an ``HTTPAccessLogEntry`` tells; None for a request that was not picked for."""
    common = entry.common_properties
    tags, response = dict(common.custom_tags), entry.response
    exchange = tags.get(EXCHANGE)
    if not exchange:
        return None
    is_streamed = response.response_headers.get(KIND, "").startswith(_STREAMED)
    is_over = common.access_log_type == DownstreamEnd
    return Told(
        exchange=exchange,
        status=response.response_code.value,
        served=_served(common),
        first_byte_after_s=_seconds(tags.get(FIRST_BYTE_US)) if is_streamed else None,
        ended_after_s=_seconds(tags.get(END_US)) if is_over else None,
        envelope=_envelope(tags.get(ENVELOPE)),
        response_bytes=response.response_body_bytes,
        outcome=_outcome(common) if is_over else None,
    )


def _served(common: Message) -> str | None:
    address = common.upstream_remote_address.socket_address
    return host_port(address.address, address.port_value) if address.address else None


def _seconds(told_us: str | None) -> float | None:
    """Return a duration by Envoy's clock alone, which may be another than the picker's."""
    if told_us is None or not told_us.isdecimal() or len(told_us) > _MOST_DIGITS:
        return None
    return int(told_us) * _US


def _envelope(told: str | None) -> bytes:
    return b"" if told is None or told == _NOTHING else told.encode(errors="replace")


def _outcome(common: Message) -> Outcome:
    flags = common.response_flags
    if flags.downstream_connection_termination:
        return Outcome.CLIENT_GONE
    if flags.upstream_connection_termination or flags.stream_idle_timeout:
        return Outcome.CUT
    return Outcome.OK
