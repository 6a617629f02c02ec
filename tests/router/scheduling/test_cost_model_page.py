"""The page on the cost model says what the code computes."""

import re
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.cost_weights import DEFAULT_WEIGHTS
from router.fleet.cost_model import Cost, Work
from tests.router.fleet.helpers import candidate

PAGE = Path(__file__).parents[3] / "docs" / "cost-model.md"
SECONDS = st.floats(0.0, 100.0)


def formulas() -> dict[str, str]:
    """Return the page's formulas by the name that each defines, in order."""
    (block,) = re.findall(r"```formula\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(line.split(" = ", 1) for line in block.splitlines())


@given(
    parts=st.fixed_dictionaries({each.name: SECONDS for each in fields(Cost)}),
    waiting=st.integers(0, 50),
    busy_share=st.floats(0.0, 2.0),
    own_share=st.floats(0.0, 2.0),
    beyond_home_s=SECONDS,
    output_tokens=st.floats(0.0, 1e4),
    decoding=st.integers(0, 50),
    tokens=st.tuples(*[st.integers(0, 10**6)] * 3),
)
def test_its_formulas_are_those_of_the_code(
    *,
    parts: dict[str, float],
    waiting: int,
    busy_share: float,
    own_share: float,
    beyond_home_s: float,
    output_tokens: float,
    decoding: int,
    tokens: tuple[int, int, int],
) -> None:
    weighed = candidate("r", waiting=waiting, busy_share=busy_share)
    weighed.cost = Cost(**parts)
    weighed.own_share, weighed.beyond_home_s = own_share, beyond_home_s
    new, matched, context = tokens
    weighed.output_tokens = output_tokens
    weighed.work = Work(
        new_tokens=new, matched_tokens=matched, decoding=decoding, context_tokens=context
    )
    known: dict[str, Any] = {
        **{each.name: getattr(DEFAULT_WEIGHTS, each.name) for each in fields(DEFAULT_WEIGHTS)},
        **parts,
        "waiting": waiting,
        "busy_share": busy_share,
        "own_share": own_share,
        "beyond_home_s": beyond_home_s,
        "output_tokens": output_tokens,
        "output_token_s": DEFAULT_WEIGHTS.output_token_s,
        "decoding": decoding,
        "prompt_tokens": new + matched,
        "context_tokens": context,
    }
    for name, formula in formulas().items():
        known[name] = eval(formula, {"max": max, "min": min, "inf": inf}, known)
    assert known["fetched_s"] == pytest.approx(weighed.cost.fetched_s)
    assert known["busy_s"] == pytest.approx(weighed.cost.busy_s)
    assert known["ttft_s"] == pytest.approx(weighed.ttft_s)
    assert known["behind"] == pytest.approx(weighed.behind(DEFAULT_WEIGHTS))
    assert known["after_s"] == pytest.approx(weighed.after_s(DEFAULT_WEIGHTS))
    assert known["others_s"] == pytest.approx(weighed.others_s(DEFAULT_WEIGHTS))
    assert known["score_s"] == pytest.approx(weighed.score_s(DEFAULT_WEIGHTS))
