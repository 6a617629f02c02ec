"""What a client sends, and how a router in model time answers it."""

from dataclasses import dataclass
from typing import Protocol

from bench.discrete.prompts import ModelPrompt
from bench.record import Record
from simulator.model.machine_and_request import SimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request, and the record that its answer is noted in."""

    prompt: ModelPrompt
    session: str | None
    streamed: bool
    output_tokens: int
    record: Record

    def began(self, now_s: float) -> None:
        """Note the first token."""
        self.record.ttft_s = now_s - self.record.sent_s

    def served(self, replica: int, request: SimRequest, now_s: float) -> None:
        """Note a whole answer."""
        record, cached = self.record, request.cached
        record.instance_id = f"r{replica}"
        record.status = 200
        record.total_s = now_s - record.sent_s
        record.cached_tokens = {"gpu": cached.gpu, "cpu": cached.cpu, "disk": cached.disk}
        record.arrived_s = request.arrived_s
        record.first_token_s = request.first_token_s
        record.finished_s = request.finished_s

    def failed(self, status: int, error: str, now_s: float) -> None:
        """Note that there was no whole answer."""
        self.record.status, self.record.error = status, error
        self.record.total_s = now_s - self.record.sent_s
        self.record.ttft_s = None


class Router(Protocol):
    """A contender."""

    async def answer(self, sent: Sent) -> None:
        """Have a request answered, and note in its record how; raises nothing."""

    def counts(self) -> dict[str, float]:
        """Return what it counted, by name."""
