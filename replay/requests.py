"""Requests in simulated time: prompts without text, and the record of an answer.

Two prompts are equal as far as the numbers of their spans are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replay.record import Record
from simulator.model.sim_request import SimRequest
from warmroute_common.keys import HashScheme


@dataclass(eq=False, slots=True)
class ModelPrompt:
    """A prompt by the keys of its blocks (`router.index.PromptView`).

    Those of the answer that is to come follow: a replica stores them as it computes them.
    """

    keys: Sequence[bytes] = field(repr=False)
    """Keys of the full blocks of prompt and answer, first to last, 8 bytes each."""
    prompt_blocks: int
    token_count: int
    token_ids: Sequence[int] = (0,)
    text: str = ""
    cache_salt: str | None = None

    @property
    def affinity(self) -> bytes:
        """Key of prompts that begin alike: their first block."""
        return self.keys[0] if self.prompt_blocks else b""

    def lora(self, adapters: object) -> None:
        """Return None: the model has no adapters."""

    def chain(
        self, scheme: HashScheme, block_tokens: int, *, lora: tuple[str, str] | None = None
    ) -> list[bytes]:
        """Return the keys of the prompt's blocks."""
        return list(self.keys[: self.prompt_blocks])

    def text_chain(self) -> list[int]:
        """Return nothing: there is no text."""
        return []


@dataclass(slots=True, kw_only=True)
class Sent:
    """One request, and the record that its answer is noted in."""

    prompt: ModelPrompt
    session: str | None
    streamed: bool
    output_tokens: int
    record: Record
    retry_after_s: float | None = None
    """When a router that refused it wants it again; None: it did not say."""

    def began(self, now_s: float) -> None:
        """Note the first token."""
        self.record.ttft_s = now_s - self.record.sent_s

    def served(self, replica: int, request: SimRequest, now_s: float) -> None:
        """Note a whole answer."""
        record, cached = self.record, request.cached
        record.instance_id = f"r{replica}"
        record.status, record.error = 200, None
        record.total_s = now_s - record.sent_s
        record.cached_tokens = {"gpu": cached.gpu, "cpu": cached.cpu, "disk": cached.disk}
        record.arrived_s = request.arrived_s
        record.first_token_s = request.first_token_s
        record.finished_s = request.finished_s

    def failed(
        self, status: int, error: str, now_s: float, *, retry_after_s: float | None = None
    ) -> None:
        """Note that there was no whole answer."""
        self.record.status, self.record.error = status, error
        self.retry_after_s = retry_after_s
        self.record.total_s = now_s - self.record.sent_s
        self.record.ttft_s = None


class Router(Protocol):
    """A contender."""

    async def answer(self, sent: Sent) -> None:
        """Have a request answered, and note in its record how; raises nothing."""

    def counts(self) -> dict[str, float]:
        """Return what it counted, by name."""
