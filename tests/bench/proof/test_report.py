"""Tables, bars, lost requests and plots, from results of a driver that is made up."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.proof.bars import Bar, bars
from bench.proof.case import Case, Search
from bench.proof.cases import ABLATED, TRACED, all_cases
from bench.proof.compare import (
    Earned,
    Effect,
    best_peer,
    earned,
    goodput_over_seeds,
    time_ratio,
)
from bench.proof.figures import Estimate
from bench.proof.plots import write_plots
from bench.proof.records import Columns, columns
from bench.proof.results import Result, Row
from bench.proof.show import costliest_table, lost, show, summary
from bench.proof.tables import names as table_names
from bench.proof.tables import part_from, part_names, rewritten, table
from bench.ttft import BenchError
from tests.bench.proof.scripted import BEST, LEFT_OUT, NAMES, NEXT, case, failed, made, record


def small(one: Case) -> Case:
    return replace(one, requests=20, seeds=one.seeds[:3], bound_s=2.0)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Published cases, of twenty requests: all sets, not all workloads of the large one."""
    left_out = {("regimes", name) for name in ("conversation", "unique", "burst", "mixture")}
    cases = [each for each in all_cases(NAMES) if (each.set, each.workload) not in left_out]
    return [made(small(each)) for each in cases]


def of_set(results: Sequence[Result], name: str) -> list[Result]:
    return [each for each in results if each.case.set == name]


def test_every_table_has_its_rows_and_says_where_it_is_from(results: list[Result]) -> None:
    for name in table_names():
        text = table(name, results)
        assert "made at 0123456789ab on 2 x cpu" in text
        heads = [line for line in text.splitlines() if line.startswith("| ---")]
        assert heads
        for line in text.splitlines():
            if line.startswith("|"):
                assert line.count("|") in {each.count("|") for each in heads}


def test_the_headline_puts_ours_first_then_peers_from_the_best(results: list[Result]) -> None:
    text = table("headline", results)
    first = text.split("**")[2]
    rows = [line.split("|")[1].strip() for line in first.splitlines() if line.startswith("| ")]
    assert rows == [
        "", "---", "ours", BEST, NEXT, "no-queue", "shared-infinite-cache",
    ]  # fmt: skip
    assert "**agents, RAM 1, 80%**" in text
    assert "**agents with pauses 5 times as long, RAM 1, 80%**" in text
    (ours,) = [line for line in first.splitlines() if line.startswith("| ours")]
    # Answers end 1 s after the first token, 10 tokens later.
    assert ours.endswith("| 100 | 100 | 0 |")


def test_the_summary_compares_ours_with_the_best_peer_and_one_infinite_cache(
    results: list[Result],
) -> None:
    text = table("summary", results)
    (row,) = [line for line in text.splitlines() if line.startswith("| rounds, RAM 0.2, 80%")]
    _, _, mean, of_peer, of_cache, p90, *_ = [each.strip() for each in row.split("|")]
    assert (of_peer, of_cache) == ("0.40 (0.40-0.40)", "1.25 (1.25-1.25)")
    assert float(mean) < float(p90)
    alone = table("summary", [made(case(contenders=("ours", BEST)))])
    assert "| 0.40 (0.40-0.40) | - |" in alone


def test_the_matrix_compares_ours_with_the_best_peer(results: list[Result]) -> None:
    text = table("regimes", results)
    # Both are scripted: 1 against 2.5, whatever the seed.
    cell = "0.40 (0.40-0.40)<br>0.40 (0.40-0.40)"
    assert f"| agents, RAM 0.2, fast disk | {cell} | {cell} | {cell} |" in text
    assert f"| agents, RAM 0.2, slow disk | - | {cell} | - |" in text
    assert f"| agents, RAM 1, fast disk, pauses 5 times as long | - | {cell} | - |" in text
    assert f"| rounds, RAM 4, fast disk | {cell} | {cell} | {cell} |" in text


def test_streaming_is_compared_with_the_mixture_of_the_headline(results: list[Result]) -> None:
    text = table("streaming", results)
    assert "| p90 of TTFT | a third whole, 80% | all streamed, 80% |" in text
    assert re.search(r"^\| no-queue \| [\d.]+ \([\d.-]+\) \| - \|$", text, re.MULTILINE)


def test_the_ablations_end_in_a_word(results: list[Result]) -> None:
    text, cases = table("ablations", results), len(ABLATED)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    assert rows["prefetch"].endswith(f"| {cases} | 0 | keep |")
    assert rows["rhythm"].endswith(f"| 0 | {cases} | lose |")
    assert rows["copies"].endswith("| 0 | 0 | lose |")
    assert rows["growth"].endswith(f"| {cases} | 0 | keep |")
    assert rows["ours-true-rates"].endswith(f"| 0 | {cases} |  |")


def effect(workload: str, low: float, value: float, high: float) -> Effect:
    estimate = Estimate(value=value, low=low, high=high, seeds=5)
    return Effect(case=workload, workload=workload, p90=None, mean=estimate)


@pytest.mark.parametrize(
    ("effects", "stays"),
    [
        ([effect("agents", 1.01, 1.1, 1.2)], True),
        ([effect("agents", 0.99, 1.1, 1.2)], False),
        ([effect("unique", 1.01, 1.1, 1.2)], False),
        ([effect("agents", 1.01, 1.1, 1.2), effect("rounds", 0.8, 0.9, 0.97)], False),
        ([effect("agents", 1.01, 1.1, 1.2), effect("unique", 0.8, 0.9, 0.97)], False),
        ([effect("agents", 1.01, 1.1, 1.2), effect("rounds", 0.94, 0.96, 0.97)], True),
        ([effect("agents", 1.01, 1.1, 1.2), effect("rounds", 0.6, 0.9, 1.3)], True),
        ([], False),
    ],
)
def test_a_mechanism_stays_where_it_earns_and_costs_nowhere(
    effects: list[Effect], stays: bool
) -> None:
    told = Earned(name="m", is_mechanism=True, effects=tuple(effects))
    assert told.verdict == ("keep" if stays else "lose")


def test_what_a_mechanism_earns_is_paired_by_seed(results: list[Result]) -> None:
    by_name = {each.name: each for each in earned(of_set(results, "ablations"))}
    assert set(by_name) == {"prefetch", "copies", "rhythm", "growth", "ours-true-rates"}
    first = by_name["prefetch"].effects[0].p90
    assert first is not None
    assert [first.value, first.low] == pytest.approx([1.5, 1.5])


def with_times(result: Result, contender: str, **figures: Any) -> Result:
    """Return a result in which a contender has other figures."""

    def changed(each: Row) -> Row:
        mine = each.contender == contender
        return replace(each, figures=replace(each.figures, **figures)) if mine else each

    return replace(result, runs=[changed(each) for each in result.runs])


def test_the_best_peer_is_chosen_by_the_figure_that_is_compared() -> None:
    one = with_times(made(case()), NEXT, ttft_mean_s=0.1)
    assert best_peer(one, "ttft_p90_s") == BEST
    assert best_peer(one, "ttft_mean_s") == NEXT
    failing = with_times(one, BEST, ttft_p90_s=None)
    assert best_peer(failing, "ttft_p90_s") == NEXT
    assert best_peer(made(case(contenders=("ours", "no-queue"))), "ttft_p90_s") is None


def test_a_goodput_beyond_the_search_is_told_as_a_bound() -> None:
    search = case(set="goodput", load=None, search=Search(), bound_s=2.0)
    one = made(search)
    found = {name: goodput_over_seeds(one, name) for name in one.case.contenders}
    assert {found["ours"].beyond, found[BEST].beyond} == {""}
    assert found["ours"].estimate.value > 2 * found[BEST].estimate.value
    generous = made(replace(search, bound_s=5.0))
    assert goodput_over_seeds(generous, "ours").beyond == "at least"
    assert "≥ " in show(generous)
    assert "≥ " in table("goodput", [generous])


def states(found: list[Bar]) -> dict[str, str]:
    return {each.what: each.state for each in found}


ROUNDS = "rounds: mean and p90 at most the best peer's plus its interval"
CACHE = "agents, RAM 4, 95%: mean and p90 at most those of one infinite cache"
FAILURES = "no failed request where the best peer has none"
MEAN_2_5 = "rounds, RAM 0.2, 80%: mean at most 2.5 s"


def test_bars_are_met_where_ours_is_far_ahead(results: list[Result]) -> None:
    ahead = [with_times(each, "ours", ttft_mean_s=0.1, ttft_p90_s=0.2) for each in results]
    found = {each.what: each for each in bars(ahead)}
    assert len(found) == 6 + 1 + 1 + 2 + 1
    assert {found[each].state for each in (ROUNDS, CACHE, MEAN_2_5)} == {"met"}
    unknown = [each.what.split(":")[0] for each in found.values() if each.state == "unknown"]
    assert unknown == ["conversation", "unique", "burst", "mixture", FAILURES]
    assert found[FAILURES].found.startswith("18 of 42 results are missing: python -m bench.proof")
    assert found[ROUNDS].found.startswith("behind in 0 of 18 figures, above 1 in 0; ")


def test_a_bar_is_missed_where_ours_is_behind(results: list[Result]) -> None:
    slow = [with_times(each, "ours", ttft_mean_s=9.0) for each in results]
    found = {each.what: each for each in bars(slow)}
    assert {found[each].state for each in (ROUNDS, CACHE, MEAN_2_5)} == {"not met"}
    assert found[ROUNDS].found.startswith("behind in 9 of 18 figures, above 1 in 9; ")
    assert "regimes-rounds-ram4-load0.5 mean" in found[ROUNDS].found
    failing = [with_times(each, "ours", ttft_p90_s=None, errors=1) for each in results]
    found = {each.what: each for each in bars(failing)}
    assert found[FAILURES].found.startswith("headline-agents-ram1-load0.8 5.0%; ")
    assert {found[each].state for each in (ROUNDS, CACHE, FAILURES)} == {"not met"}


def test_a_loss_within_the_interval_is_told_and_is_none(results: list[Result]) -> None:
    rounds = [each for each in results if each.case.workload == "rounds"]

    def noisy(result: Result) -> Result:
        rows = [
            replace(each, figures=replace(each.figures, ttft_p90_s=1.1 + 0.5 * (each.seed % 2)))
            if each.contender == "ours"
            else replace(each, figures=replace(each.figures, ttft_p90_s=1.2))
            for each in result.runs
        ]
        return replace(result, runs=rows)

    (bar,) = [each for each in bars([*map(noisy, rounds)]) if each.what == ROUNDS]
    assert bar.state == "met"
    assert bar.found.startswith("behind in 0 of 18 figures, above 1 in 9; ")


def test_a_peer_that_is_left_out_elsewhere_must_not_be_the_best(results: list[Result]) -> None:
    what = "no peer that is left out of the other cases is the best"
    with_all = of_set(results, "peers")
    assert states(bars(with_all))[what] == "met"
    for name, missed_in in ((LEFT_OUT, {*TRACED}), ("vllm-kv-aware", {"agents"})):
        ahead = [with_times(each, name, ttft_p90_s=0.5) for each in with_all]
        (bar,) = [each for each in bars(ahead) if each.what == what]
        assert bar.state == "not met"
        for workload in TRACED:
            assert (f"{name} in peers-{workload}" in bar.found) == (workload in missed_in)


def test_a_bar_without_a_result_is_unknown_and_says_what_to_make() -> None:
    found = bars([])
    assert {each.state for each in found} == {"unknown"}
    assert "make --only headline" in found[0].found


def test_a_marked_part_is_rewritten_and_the_rest_is_left_alone(results: list[Result]) -> None:
    before = (
        "# Title\n\n<!-- proof:faults -->\nold\n<!-- /proof:faults -->\n\nText.\n"
        "<!-- proof:plot-goodput -->\n<!-- /proof:plot-goodput -->\nEnd.\n"
    )
    part = part_from(results, "bench/results/proof")
    after = rewritten(before, part)
    assert part_names(after) == ["faults", "plot-goodput"]
    assert after.startswith("# Title\n\n<!-- proof:faults -->\n\n| p90 of TTFT")
    assert "old" not in after
    assert "](bench/results/proof/goodput.png)\n\n<!-- /proof:plot-goodput -->\nEnd.\n" in after
    assert rewritten(after, part) == after
    edited = after.replace("0.40", "0.30")
    assert edited != after
    assert rewritten(edited, part) == after


@pytest.mark.parametrize(
    "text",
    [
        "<!-- proof:faults -->\n",
        "<!-- /proof:faults -->\n<!-- proof:faults -->\n",
        "<!-- proof:faults -->\n<!-- /proof:other -->\n",
        "<!-- proof:faults -->\n<!-- proof:faults -->\n",
    ],
)
def test_marks_without_partners_are_named(text: str) -> None:
    with pytest.raises(BenchError, match=r"line 1 \(<!-- .*(no pair|no partner)"):
        rewritten(text, lambda name: "")


def test_a_table_that_is_unknown_or_empty_says_what_to_do(results: list[Result]) -> None:
    with pytest.raises(BenchError, match="no table 'nonsense': there are summary"):
        table("nonsense", results)
    with pytest.raises(BenchError, match="make --only headline"):
        table("headline", of_set(results, "faults"))


def test_infinite_times_are_told_as_such() -> None:
    one = with_times(made(case()), NEXT, ttft_p90_s=None, errors=5)
    text = table("headline", [one])
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {NEXT}")]
    assert "| ∞ |" in row
    assert "25.0%" in row
    ratio = time_ratio(one, NEXT, "ours", "ttft_p90_s")
    assert ratio is not None
    assert ratio.value == float("inf")
    assert "∞" in show(one)


def test_a_result_is_shown_with_the_difference_to_ours() -> None:
    text = show(made(case()))
    (ours, *_) = [line for line in text.splitlines() if line.startswith("ours")]
    (peer, *_) = [line for line in text.splitlines() if line.startswith(BEST)]
    head = re.split(r"\s{2,}", text.splitlines()[1])
    assert head[5:9] == ["answer p50", "p90", "TPOT p50, ms", "p90, ms"]
    less_ours = head.index("less ours")
    assert re.split(r"\s{2,}", ours)[less_ours] == "-"
    told = re.split(r"\s{2,}", peer)[less_ours].split(" ")[0]
    assert float(told) == pytest.approx(1.8, rel=0.02)
    assert text.startswith("headline-agents-ram1-load0.8: 3 seeds of 20 requests, prefill binds")


def test_a_result_without_ours_is_shown_too() -> None:
    text = show(made(case(contenders=(BEST, "no-queue"))))
    assert [line.split()[0] for line in text.splitlines()[2:4]] == [BEST, "no-queue"]


def kept(contender: str, times_s: Sequence[float | None]) -> Columns:
    headers = {"reason": "session"} if contender == "ours" else {}
    return columns(
        contender,
        101,
        [
            failed(number)
            if time_s is None
            else record(number, ttft_s=time_s, headers=headers, instance_id=contender)
            for number, time_s in enumerate(times_s)
        ],
    )


def test_the_costliest_requests_come_first_with_both_decisions() -> None:
    found = lost(kept("ours", [1.0, 9.0, 4.0, None, 1.0]), kept("vllm", [2.0, 1.0, 1.0, 1.0, None]))
    assert [(each.number, each.lost_s) for each in found] == [(1, 8.0), (2, 3.0), (0, -1.0)]
    text = costliest_table(found[:1], "vllm")
    assert "session" in text.splitlines()[1]
    assert "200/100/0" in text
    told = summary(found, 1)
    assert "2 of 3 requests were answered later, by 11 s in all (the first 1: 8 s)" in told
    assert "session 11 s" in told


def test_plots_are_written(tmp_path: Path, results: list[Result]) -> None:
    def records(result: Result) -> list[Columns]:
        ours, peer, *_ = result.case.contenders
        return [kept(ours, [1.0, None, 2.0]), kept(peer, [2.0, 3.0, 4.0])]

    written = write_plots(tmp_path, results, records)
    assert [path.name for path in written] == ["goodput.png", "ttft.png", "p90.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert write_plots(tmp_path, of_set(results, "faults"), records) == []
