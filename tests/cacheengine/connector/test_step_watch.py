"""Steps of vLLM's scheduler, timed from their scheduling to their results."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

from tests.cacheengine.helpers import FakeClock  # noqa: E402


def output(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]], *ended: str) -> Any:
    """Return a scheduler's output: tokens computed before and scheduled, by request."""
    tokens = {name: each for name, (_, each) in (new | cached).items()}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[before for before, _ in cached.values()]
        ),
        scheduled_spec_decode_tokens={"drafts": [1, 2]} if "drafts" in tokens else {},
        finished_req_ids=set(ended),
    )


class Meter:
    def __init__(self) -> None:
        self.steps: list[tuple[float, int, float, int]] = []
        self.counts: list[int] = []

    def add(
        self, step_s: float, *, prefill_tokens: int, attended: float, decoding: int, steps: int = 1
    ) -> None:
        self.steps.append((step_s, prefill_tokens, attended, decoding))
        self.counts.append(steps)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from vllm.v1.core.sched.scheduler import Scheduler

    from cacheengine.connector.connector import StepWatch

    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, *given: given)
    meter: Any = Meter()
    watch = StepWatch(meter, FakeClock())
    yield SimpleNamespace(watch=watch, meter=meter, clock=watch._clock, scheduler=Scheduler)
    watch.end()


def results(watch: Any, step: Any) -> None:
    """Have the scheduler get the results of a step."""
    scheduler = watch.scheduler.__new__(watch.scheduler)
    assert scheduler.update_from_output(step, "results") == (step, "results")


def test_a_step_takes_from_its_scheduling_to_its_results(watch: Any) -> None:
    step = output({"a": (1000, 500)}, {"b": (7, 1), "c": (300, 200), "drafts": (9, 3)})
    watch.watch.scheduled(step)
    watch.clock.advance(0.25)
    results(watch, step)
    assert watch.meter.steps == [(0.25, 700, 500 * 1250 + 200 * 400, 2)]


def test_a_step_that_is_scheduled_ahead_begins_when_the_one_before_it_ends(watch: Any) -> None:
    first, second = output({"a": (0, 100)}, {}), output({}, {"a": (100, 1)})
    watch.watch.scheduled(first)
    watch.clock.advance(0.1)
    watch.watch.scheduled(second)
    watch.clock.advance(0.2)
    results(watch, first)
    watch.clock.advance(0.05)
    results(watch, second)
    assert [round(each[0], 6) for each in watch.meter.steps] == [0.3, 0.05]


def test_a_pause_between_two_steps_is_none_of_them(watch: Any) -> None:
    for _ in range(2):
        step = output({"a": (0, 100)}, {})
        watch.watch.scheduled(step)
        watch.clock.advance(0.1)
        results(watch, step)
        watch.clock.advance(60.0)
    assert [round(each[0], 6) for each in watch.meter.steps] == [0.1, 0.1]


def test_steps_without_tokens_and_unknown_results_are_left_out(watch: Any) -> None:
    watch.watch.scheduled(output({}, {}))
    results(watch, output({"a": (0, 100)}, {}))
    assert watch.meter.steps == []


def test_a_step_without_tokens_leaves_those_scheduled_ahead(watch: Any) -> None:
    empty, first, second = (
        output({}, {}),
        output({"a": (512, 100)}, {}),
        output({}, {"a": (612, 1)}),
    )
    watch.watch.scheduled(empty)
    watch.watch.scheduled(first)
    results(watch, empty)
    watch.watch.scheduled(second)
    watch.clock.advance(0.1)
    results(watch, first)
    watch.clock.advance(0.05)
    results(watch, second)
    assert [round(each[0], 6) for each in watch.meter.steps] == [0.1, 0.05]


def test_a_step_without_tokens_takes_no_time_of_the_next(watch: Any) -> None:
    empty, step = output({}, {}), output({"a": (0, 1000)}, {})
    watch.watch.scheduled(empty)
    watch.watch.scheduled(step)
    watch.clock.advance(0.03)  # the step's kernels are sent to the GPU
    results(watch, empty)
    watch.clock.advance(0.01)
    results(watch, step)
    assert [round(each[0], 6) for each in watch.meter.steps] == [0.04]


def test_a_step_that_a_prefill_overtook_is_timed_with_it(watch: Any) -> None:
    decodes = [output({}, {"a": (100 + n, 1), "b": (900 + n, 1)}) for n in range(3)]
    prefill = output({"c": (0, 1000)}, {"a": (103, 1)})
    watch.watch.scheduled(decodes[0])
    watch.clock.advance(0.01)
    watch.watch.scheduled(decodes[1])
    results(watch, decodes[0])
    watch.watch.scheduled(prefill)
    # The results of the second decode are there after 0.01 s, but are looked for only after the
    # prefill's kernels were sent.
    watch.clock.advance(0.03)
    results(watch, decodes[1])
    watch.watch.scheduled(decodes[2])
    watch.clock.advance(0.005)
    results(watch, prefill)
    watch.clock.advance(0.01)
    results(watch, decodes[2])
    times = [round(each[0], 6) for each in watch.meter.steps]
    assert times == [0.01, 0.035, 0.01]
    assert watch.meter.steps[1][1:] == (1000, 500_000, 3)
    assert watch.meter.counts == [1, 2, 1]


def test_after_its_end_nothing_is_added(watch: Any) -> None:
    step = output({"a": (0, 100)}, {})
    watch.watch.scheduled(step)
    watch.watch.end()
    results(watch, step)
    assert watch.meter.steps == []


def test_prompts_that_are_not_computed_yet_are_counted() -> None:
    from cacheengine.connector.connector import UncomputedPrompts

    prompts = UncomputedPrompts()
    for name in ("a", "b", "c", "aborted"):
        prompts.add(name, 1000)
    assert (prompts.besides("a"), prompts.besides("other")) == (3, 4)
    prompts.scheduled(output({"a": (800, 200), "b": (0, 500)}, {}))
    assert prompts.besides("c") == 2, "b and the one that will be aborted"
    prompts.scheduled(output({}, {"a": (1000, 1), "b": (500, 499)}, "aborted"))
    assert prompts.besides("c") == 1
    prompts.scheduled(output({}, {"b": (999, 1)}))
    assert prompts.besides("c") == 0
