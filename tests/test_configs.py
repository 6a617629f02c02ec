"""The shipped configuration files: each loads, and together they make one fleet."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cacheengine.settings.lmcache_file import load_engine_config
from router.config.loading import load_router_config
from router.config.settings import ControllerConfig
from router.launch.fleet_file import load_fleet_file

CONFIGS = Path(__file__).parent.parent / "configs"
INSTANCES = ("instance1", "instance2")


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instances_file_loads_and_stays_in_the_working_directory(name: str) -> None:
    config = load_engine_config(CONFIGS / f"{name}.yaml", environment={})
    assert config.local_disk
    for directory in config.local_disk:
        assert Path.cwd() in directory.parents
        assert ".warmroute" in directory.parts


def test_two_instances_share_nothing() -> None:
    first, second = (load_engine_config(CONFIGS / f"{n}.yaml", environment={}) for n in INSTANCES)
    for name in ("local_disk", "lmcache_worker_port", "lmcache_instance_id", "distributed_url"):
        assert getattr(first, name) != getattr(second, name)


def test_the_router_knows_the_instances_by_name_and_port() -> None:
    router = load_router_config(CONFIGS / "router.yaml")
    engines = [load_engine_config(CONFIGS / f"{n}.yaml", environment={}) for n in INSTANCES]
    assert [each.instance_id for each in router.replicas] == [
        each.lmcache_instance_id for each in engines
    ]
    assert [urlsplit(each.agent_url or "").port for each in router.replicas] == [
        each.lmcache_worker_port for each in engines
    ]


def test_the_fleet_starts_the_same_replicas_that_the_router_expects() -> None:
    router = load_router_config(CONFIGS / "router.yaml")
    fleet = load_fleet_file(CONFIGS / "fleet.yaml")
    assert [part.url for part in fleet.replicas] == [each.url for each in router.replicas]
    assert [part.name for part in fleet.replicas] == [each.instance_id for each in router.replicas]
    assert urlsplit(fleet.router.url).port == router.port


def test_the_replicas_register_where_the_controller_listens() -> None:
    router = load_router_config(CONFIGS / "router.yaml")
    fleet = load_fleet_file(CONFIGS / "fleet.yaml")
    assert router.controller is not None
    assert fleet.router_settings["controller"] == {
        "port": router.controller.port,
        "monitor_port": router.controller.monitor_port,
    }
    for name in INSTANCES:
        config = load_engine_config(CONFIGS / f"{name}.yaml", environment={})
        assert config.enable_controller
        assert config.controller_url == f"localhost:{router.controller.monitor_port}"


def test_what_the_router_file_shows_is_the_default() -> None:
    """Its comments say so; an example that changes behaviour would mislead."""
    router = load_router_config(CONFIGS / "router.yaml")
    bare = type(router)(replicas=router.replicas, controller=ControllerConfig())
    assert router == bare
