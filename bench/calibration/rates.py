"""A simulated replica's rates, from the times of a real one. Pure.

The prefill of a prompt that nothing is known of takes::

    request_s + steps * step_s + tokens / rate * (1 + tokens / 2 / attention_tokens)

and a step that only decodes takes ``step_s`` and something for each sequence.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Times:
    """What was measured of the real replica, in seconds (medians)."""

    cold_s: Mapping[int, float]
    """TTFT by the length of a prompt that nothing was cached of."""
    token_s: Mapping[int, float]
    """Between two tokens of an answer, by how many are decoded at once."""
    gpu_s: float
    """TTFT of a prompt whose beginning is in the GPU tier,"""
    cpu_s: float
    """in CPU RAM,"""
    disk_s: float
    """on disk alone."""
    prefix_tokens: int
    """How long that beginning is."""


@dataclass(frozen=True, kw_only=True)
class FittedRates:
    """What the simulated replica is started with; the names are its own."""

    request_s: float
    step_s: float
    decode_s_per_sequence: float
    prefill_tokens_per_s: float
    attention_tokens: float
    load_tokens_per_s: float
    disk_tokens_per_s: float


_NO_TIME_PER_TOKEN_S: Final = 1e-7
"""Stands for a difference that is too small to be measured."""


def fit(times: Times, *, batched_tokens: int) -> FittedRates:
    """Return the rates by which a replica would take these times.

    ``batched_tokens`` is the most that it computes in one step. Raises
    ValueError when the times are no replica's.
    """
    step_s, decode_s = _line(times.token_s)
    lengths = np.array(sorted(times.cold_s), dtype=np.float64)
    steps = np.ceil(lengths / batched_tokens)
    cold_s = np.array([times.cold_s[int(each)] for each in lengths])
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1)
    request_s, token_s, square_s = _fit_nonnegative(terms, cold_s - steps * step_s, cold_s)
    if token_s <= 0:
        raise ValueError(f"TTFT does not grow with the prompt: {dict(times.cold_s)}")
    return FittedRates(
        request_s=request_s,
        step_s=step_s,
        decode_s_per_sequence=decode_s,
        prefill_tokens_per_s=1 / token_s,
        # 0 is the simulator's word for no such term.
        attention_tokens=token_s / (2 * square_s) if square_s > 0 else 0.0,
        load_tokens_per_s=_per_s(times.prefix_tokens, times.cpu_s - times.gpu_s),
        disk_tokens_per_s=_per_s(times.prefix_tokens, times.disk_s - times.cpu_s),
    )


def _line(token_s: Mapping[int, float]) -> tuple[float, float]:
    """Return what every step takes, and what each sequence adds to it."""
    counts = np.array(sorted(token_s), dtype=np.float64)
    took_s = np.array([token_s[int(each)] for each in counts])
    step_s, each_s = _fit_nonnegative(
        np.stack([np.ones_like(counts), counts], axis=1), took_s, took_s
    )
    return step_s, each_s


def _fit_nonnegative(terms: Vector, values: Vector, scale: Vector) -> list[float]:
    """Return the coefficients, none below 0, with the least squares of the relative errors.

    The terms are few: every choice of those that are not 0 is tried.
    """
    columns = terms.shape[1]
    best, best_error = [0.0] * columns, math.inf
    for count in range(columns, 0, -1):
        for chosen in itertools.combinations(range(columns), count):
            some = terms[:, chosen] / scale[:, None]
            found = np.linalg.lstsq(some, values / scale, rcond=None)[0]
            error = float(np.sum((some @ found - values / scale) ** 2))
            if (found >= 0).all() and error < best_error:
                best_error = error
                best = [0.0] * columns
                for index, each in zip(chosen, found, strict=True):
                    best[index] = float(each)
    return best


def _per_s(tokens: int, seconds: float) -> float:
    return 1 / max(seconds / tokens, _NO_TIME_PER_TOKEN_S)
