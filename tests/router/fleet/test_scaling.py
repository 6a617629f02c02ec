"""How many replicas a model needs, with exact outcomes. A thousand tokens take about a second."""

from collections.abc import Iterable, Mapping
from math import inf

import pytest

from router.fleet.fleet import Fleet
from router.fleet.scaling import HeldWork, PoolLoad, Resource, Scaling
from tests.router.fleet.helpers import make_fleet
from tests.router.prompt.prompts_given import tokens
from tests.router.scheduling.helpers import Driver, make_learned_fleet


class Held:
    """What a router holds."""

    def __init__(
        self, work: Iterable[HeldWork] = (), without: Mapping[str | None, int] | None = None
    ) -> None:
        self.work = work
        self.without = without or {}

    def held(self) -> Iterable[HeldWork]:
        return self.work

    def without_replica(self) -> Mapping[str | None, int]:
        return self.without


def serving(count: int, models: Mapping[str, str | None] | None = None) -> Fleet:
    fleet = make_learned_fleet(count)
    for each in fleet.replicas.values():
        fleet.set_models(each.id, {"m": None} if models is None else models)
    return fleet


def only(fleet: Fleet, held: Held | None = None, *, now_s: float = 0.0, **more: int) -> PoolLoad:
    (load,) = Scaling(fleet, held or Held(), **more).loads(now_s)
    return load


def test_an_idle_fleet_needs_nothing() -> None:
    load = only(serving(2))
    assert (load.model, load.replicas, load.predicted_wait_s) == ("m", 2, 0.0)
    assert load.demand == {Resource.PREFILL: 0.0, Resource.KV_MEMORY: 0.0}
    assert [each.replicas for each in load.sizes] == [1, 2, 3]
    assert {(each.utilization, each.usual_wait_s) for each in load.sizes} == {(0, 0)}
    assert {each.drain_s for each in load.sizes} == {0}


def test_a_single_replica_is_not_taken_away() -> None:
    assert [each.replicas for each in only(serving(1)).sizes] == [1, 2]


def test_sent_and_held_work_is_counted_in_replicas() -> None:
    """Of a load that two replicas cannot do, three can."""
    fleet = serving(2)
    driver = Driver(fleet)
    for name in "abcdef":
        driver.ask(name, 12.0)
    sent = [each.decision.picked.busy_s for each in driver.admitted.values()]
    held = list(driver.queue.held())
    assert len(sent) == 2 and len(held) == 4
    load = only(fleet, Held(held))
    work_s = sum(sent) + sum(each.work_s for each in held)
    assert load.demand[Resource.PREFILL] == pytest.approx(work_s / 30.0)
    assert load.binds is Resource.PREFILL and load.held == 4
    fewer, now, more = load.sizes
    assert fewer.utilization == 2 * now.utilization == 3 * more.utilization
    assert now.utilization > 1 > more.utilization
    assert now.usual_wait_s == inf
    share, mean_s = more.utilization, sum(sent) / 2
    assert more.usual_wait_s == pytest.approx(mean_s * share / (1 - share))
    assert more.drain_s < now.drain_s < fewer.drain_s < inf
    first_s = min(each.queue.wait_s(0.0) for each in fleet.replicas.values())
    assert load.predicted_wait_s > first_s + 12.0, "others go first"


def test_a_prompt_that_several_wait_for_is_computed_once() -> None:
    driver = Driver(make_fleet(1))
    driver.ask("a", 12.0)
    for name in "bcd":
        assert not driver.ask(name, tokens(12_000))
    work = [each.work_s for each in driver.queue.held()]
    assert len(work) == 3 and sum(each > 0 for each in work) == 1


def test_kv_memory_binds_where_prompts_fill_it() -> None:
    fleet = serving(1)
    fleet.set_kv_capacity("r0", 10_000)
    driver = Driver(fleet)
    driver.ask("a", 8.0)
    driver.ask("b", 8.0)
    load = only(fleet, Held(driver.queue.held()))
    assert load.demand[Resource.KV_MEMORY] == pytest.approx(1.6)
    assert load.binds is Resource.KV_MEMORY


def test_answers_at_once_bind_where_their_limit_is_known() -> None:
    fleet = serving(2)
    fleet.replicas["r0"].decoding = 6
    assert Resource.DECODE not in only(fleet).demand
    load = only(fleet, decode_slots=4)
    assert load.binds is Resource.DECODE and load.sizes[1].utilization == 0.75


def test_adapters_and_names_count_with_their_model() -> None:
    fleet = serving(1, {"z-base": None, "a-adapter": "path", "z-other-name": None})
    assert only(fleet, Held(without={"a-adapter": 2})).without_replica == 2
    assert only(fleet).model == "z-base"


def test_a_model_whose_replicas_are_gone_keeps_its_name() -> None:
    fleet = serving(1, {"base": None, "adapter": "path"})
    fleet.remove("r0")
    load = only(fleet, Held(without={"adapter": 3}))
    assert (load.model, load.replicas, load.without_replica) == ("base", 0, 3)
    assert load.predicted_wait_s == inf
    assert [each.replicas for each in load.sizes] == [1]


def test_clients_cannot_name_many_models() -> None:
    held = Held(without={f"m{at:02}": 100 - at for at in range(50)})
    loads = Scaling(make_learned_fleet(0), held).loads(0.0)
    assert [each.model for each in loads] == [*(f"m{at:02}" for at in range(20)), "other"]
    assert sum(each.without_replica for each in loads) == sum(held.without.values())


def test_the_models_that_are_remembered_are_bounded() -> None:
    fleet = make_learned_fleet(1)
    for at in range(3):
        fleet.set_models("r0", {f"{at}-{n}": None for n in range(5_000)})
    assert len(fleet.pools) == 10_000 and "0-1" not in fleet.pools and "2-1" in fleet.pools
