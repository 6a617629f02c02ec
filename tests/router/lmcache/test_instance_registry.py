"""The instances that the controller knows: pure state, times passed in."""

import pytest

from router.lmcache.instance_registry import MISSED_HEARTBEATS, ConfiguredInstance, InstanceRegistry
from warmroute_common.addresses import is_same_url
from warmroute_common.agent_protocol import Heartbeat, Registration
from warmroute_common.api_errors import ConflictError, OverloadedError


def registration(
    name: str, url: str = "http://10.0.0.1:8101", incarnation: str = "one", heartbeat_s: float = 5.0
) -> Registration:
    return Registration(
        instance_id=name,
        incarnation=incarnation,
        agent_url=url,
        transfer_port=8201,
        heartbeat_s=heartbeat_s,
    )


def beat(name: str, incarnation: str = "one") -> Heartbeat:
    return Heartbeat(instance_id=name, incarnation=incarnation)


def configured(
    name: str, url: str = "http://10.0.0.9:8101", incarnation: str | None = None
) -> ConfiguredInstance:
    return ConfiguredInstance(id=name, agent_url=url, incarnation=incarnation)


def ids(registry: InstanceRegistry) -> list[str]:
    return [each.id for each in registry.instances()]


def test_a_registered_instance_is_known_until_it_leaves() -> None:
    registry = InstanceRegistry(list)
    assert registry.register(registration("a"), 0.0) is None
    assert ids(registry) == ["a"]
    found = registry.find("a")
    assert found is not None
    assert (found.agent_url, found.is_configured) == ("http://10.0.0.1:8101", False)
    assert registry.find("b") is None
    assert registry.deregister(beat("a"))
    assert ids(registry) == []
    assert not registry.deregister(beat("a"))


def test_three_missed_heartbeats_are_the_end() -> None:
    registry = InstanceRegistry(list)
    registry.register(registration("a", heartbeat_s=5.0), 100.0)
    assert registry.heartbeat(beat("a"), 104.0)
    last = 104.0 + MISSED_HEARTBEATS * 5.0
    assert registry.expire(last) == []
    (gone,) = registry.expire(last + 0.001)
    assert gone.registration.instance_id == "a"
    assert not registry.heartbeat(beat("a"), last + 1.0), "it must register anew"


def test_a_heartbeat_that_comes_too_late_does_not_revive() -> None:
    registry = InstanceRegistry(list)
    registry.register(registration("a", heartbeat_s=1.0), 0.0)
    assert not registry.heartbeat(beat("a"), 3.5)


def test_another_incarnation_must_register_first() -> None:
    registry = InstanceRegistry(list)
    registry.register(registration("a", incarnation="one"), 0.0)
    assert not registry.heartbeat(beat("a", "two"), 1.0)
    before = registry.register(registration("a", incarnation="two"), 1.0)
    assert before is not None and before.registration.incarnation == "one"
    assert registry.heartbeat(beat("a", "two"), 2.0)
    assert not registry.heartbeat(beat("a", "one"), 2.0)
    assert not registry.deregister(beat("a", "one")), "the old one's farewell comes too late"
    assert ids(registry) == ["a"]


def test_the_latest_to_claim_a_name_has_it() -> None:
    registry = InstanceRegistry(list)
    registry.register(registration("a", "http://10.0.0.1:1", "one"), 0.0)
    before = registry.register(registration("a", "http://10.0.0.2:1", "two"), 1.0)
    assert before is not None and before.registration.agent_url == "http://10.0.0.1:1"
    found = registry.find("a")
    assert found is not None and found.agent_url == "http://10.0.0.2:1"
    assert not registry.heartbeat(beat("a", "one"), 2.0)


def test_a_configured_name_is_no_other_agents() -> None:
    registry = InstanceRegistry(lambda: [configured("a")])
    with pytest.raises(
        ConflictError, match=r"'a' is configured with the agent at http://10\.0\.0\.9"
    ):
        registry.register(registration("a", "http://10.0.0.1:8101"), 0.0)
    found = registry.find("a")
    assert found is not None and found.agent_url == "http://10.0.0.9:8101"


def test_a_configured_agent_that_registers_is_one_instance() -> None:
    registry = InstanceRegistry(lambda: [configured("a", "http://localhost:8101/")])
    registry.register(registration("a", "http://127.0.0.1:8101"), 3.0)
    (only,) = registry.instances()
    assert only.is_configured
    assert only.registered is not None and only.registered.seen_s == 3.0


def test_one_agent_under_two_names_answers_to_both() -> None:
    """The router's file may name a replica otherwise than its own lmcache_instance_id."""
    registry = InstanceRegistry(lambda: [configured("east", "http://gpu1:8101", incarnation="one")])
    registry.register(registration("lmcache_instance_1", "http://10.0.0.1:8101", "one"), 0.0)
    assert ids(registry) == ["east"]
    assert registry.find("lmcache_instance_1") == registry.find("east")


def test_a_name_that_the_configuration_takes_later_is_the_configurations() -> None:
    """A replica without a configured name gets its agent's once that has answered."""
    known: list[ConfiguredInstance] = []
    registry = InstanceRegistry(lambda: known)
    registry.register(registration("a", "http://10.0.0.1:8101"), 0.0)
    known.append(configured("a", "http://10.0.0.9:8101"))
    (only,) = registry.instances()
    assert (only.agent_url, only.registered) == ("http://10.0.0.9:8101", None)


def test_an_id_counts_before_another_name() -> None:
    known = [configured("a", "http://10.0.0.1:8101"), configured("b", "http://10.0.0.2:8101")]
    registry = InstanceRegistry(lambda: known)
    known_as_b = registration("c", "http://10.0.0.1:8101")
    registry.register(known_as_b, 0.0)
    assert [each.id for each in registry.instances() if each.answers_to("c")] == ["a"]
    found = registry.find("b")
    assert found is not None and found.agent_url == "http://10.0.0.2:8101"


def test_registrations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.lmcache.instance_registry.MAX_REGISTERED", 2)
    registry = InstanceRegistry(list)
    registry.register(registration("a", heartbeat_s=1.0), 0.0)
    registry.register(registration("b", heartbeat_s=9.0), 0.0)
    with pytest.raises(OverloadedError, match="the limit of 2 registered instances"):
        registry.register(registration("c"), 1.0)
    registry.register(registration("b", incarnation="two"), 1.0)
    registry.expire(5.0)
    registry.register(registration("c"), 5.0)
    assert ids(registry) == ["b", "c"]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("http://a:1", "http://a:1/", True),
        ("http://A:1", "http://a:1", True),
        ("http://localhost:1", "http://[::1]:1", True),
        ("http://a", "http://a:80", True),
        ("http://a:1", "http://a:2", False),
        ("http://a:1", "https://a:1", False),
        ("http://a:1/x", "http://a:1", False),
    ],
)
def test_urls_are_compared_by_what_they_name(first: str, second: str, same: bool) -> None:
    assert is_same_url(first, second) is same
