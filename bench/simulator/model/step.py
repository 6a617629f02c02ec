"""What a replica computes at one time. Pure."""

from dataclasses import dataclass

from bench.simulator.model.request import SimRequest


@dataclass(slots=True)
class Step:
    """``count`` equal steps that follow each other; only those without prefill are more than one.

    ``prefill`` says how many tokens of which prompt.
    """

    begin_s: float
    step_s: float
    count: int
    prefill: list[tuple[SimRequest, int]]
    decoding: list[SimRequest]

    @property
    def end_s(self) -> float:
        """When the last of them ends."""
        return self.begin_s + self.step_s * self.count
