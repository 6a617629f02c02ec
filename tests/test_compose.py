"""The compose file: its parts fit each other, and its commands make a fleet.

There is no container runtime here, so the commands run as processes. Their addresses are moved into
127.0.0.0/8, where each service has one of its own as in the compose file's network.
"""

import json
import socket
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from router.config.loading import load_router_config
from tests.cacheengine.helpers import wait_until
from tests.processes import ServerProcess
from tests.test_docker import IMAGES, last, lineage
from tools.reference import known_commands

FOLDER: Final = Path(__file__).parent.parent / "configs" / "docker"
FILES: Final = FOLDER / "compose"
NETWORK: Final = "172.30.57."
OWN_NETWORK: Final = "127.30.57."


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


SERVICES: Final[dict[str, dict[str, Any]]] = compose()["services"]
OWN: Final = {name: each for name, each in SERVICES.items() if "build" in each}
REPLICAS: Final = {name: each for name, each in OWN.items() if each["command"][0] == "simulate"}


def options(service: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a service's command; raises for one that does not exist."""
    name, *arguments = service["command"]
    return dict(known_commands()[name].make_context(name, list(arguments)).params)


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Return the files that a service sees, by their paths in its container."""
    parts = [each.split(":") for each in service.get("volumes", ())]
    assert all(mode == "ro" for _, _, mode in parts)
    return {there: (FOLDER / here).resolve() for here, there, _ in parts}


def test_images_are_pinned_and_ours_are_built_from_the_stages_that_exist() -> None:
    assert len(OWN) == 3
    for service in OWN.values():
        build = service["build"]
        assert (FOLDER / build["context"]).resolve() == FOLDER.parent.parent
        assert (Path(build["dockerfile"]).name, build["target"]) in IMAGES
        assert [*lineage("Dockerfile", build["target"])]
        assert json.loads(last("Dockerfile", build["target"], "ENTRYPOINT")) == ["warmroute"]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert all(":" in each["image"] and "latest" not in each["image"] for each in SERVICES.values())


def test_ports_are_published_on_this_machine_only() -> None:
    published = [port for each in SERVICES.values() for port in each.get("ports", ())]
    assert [each.rpartition(":")[2] for each in published] == ["8080", "9090", "3000"]
    assert all(each.startswith("127.0.0.1:") for each in published)


def test_the_router_knows_the_replicas_where_they_listen() -> None:
    config = load_router_config(FILES / "router.yaml")
    asked = [(urlsplit(each.url).netloc, each.agent_url, each.name) for each in config.replicas]
    started = []
    for service in REPLICAS.values():
        given = options(service)
        host = service["networks"]["fleet"]["ipv4_address"]
        assert given["host"] == host
        agent = f"http://{host}:{given['agent_port']}"
        started.append((f"{host}:{given['port']}", agent, f"sim{given['first']}"))
        assert f"http://{host}:{given['port']}/health" in service["healthcheck"]["test"][-1]
    assert asked == started
    [subnet] = compose()["networks"]["fleet"]["ipam"]["config"]
    assert subnet == {"subnet": f"{NETWORK}0/24"}
    router = SERVICES["router"]
    assert str(options(router)["config_path"]) in mounts(router)
    assert config.host == "0.0.0.0"
    assert router["ports"] == [f"127.0.0.1:8080:{config.port}"]


def test_prometheus_and_grafana_read_files_that_are_there() -> None:
    for service in SERVICES.values():
        assert all(each.is_file() for each in mounts(service).values())
    inside = mounts(SERVICES["prometheus"])
    [file] = [each for each in SERVICES["prometheus"]["command"] if "--config.file=" in each]
    path = Path(file.partition("=")[2])
    settings = yaml.safe_load(inside[str(path)].read_text())
    assert all(str(path.parent / each) in inside for each in settings["rule_files"])
    targets = {
        target
        for job in settings["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    config = load_router_config(FILES / "router.yaml")
    expected = {f"router:{config.port}"}
    for name, service in REPLICAS.items():
        given = options(service)
        expected |= {f"{name}:{given['port']}", f"{name}:{given['agent_port']}"}
    assert targets == expected
    inside = mounts(SERVICES["grafana"])
    folder = "/etc/grafana/provisioning"
    [source] = yaml.safe_load(inside[f"{folder}/datasources/warmroute.yaml"].read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    [provider] = yaml.safe_load(inside[f"{folder}/dashboards/warmroute.yaml"].read_text())[
        "providers"
    ]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in inside
    assert Path(home).parent == Path(provider["options"]["path"])


def test_its_commands_make_a_fleet_that_answers(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text((FILES / "router.yaml").read_text().replace(NETWORK, OWN_NETWORK))
    environment = {"WARMROUTE_FLEET_SECRET": "0123456789abcdef" * 4, "HOME": str(tmp_path)}
    with ExitStack() as stack:

        def start(name: str, url: str, *more: str) -> None:
            words = [each.replace(NETWORK, OWN_NETWORK) for each in SERVICES[name]["command"]]
            words = [
                f"--config={config}" if each.startswith("--config=") else each for each in words
            ]
            process = ServerProcess(tmp_path / f"{name}.log")
            variables = [f"{key}={value}" for key, value in environment.items()]
            command = ["env", *variables, sys.executable, "-m", "router", *words, *more]
            process.run(command, lambda: answers(f"{url}/health"), directory=Path.cwd())
            stack.callback(process.terminate)

        for name, service in REPLICAS.items():
            start(name, f"http://{OWN_NETWORK}{service['command'][3][-2:]}:8000")
        router = f"{OWN_NETWORK}13"
        with socket.create_server((router, 0)) as free:
            port = free.getsockname()[1]
        start("router", f"http://{router}:{port}", f"--host={router}", f"--port={port}")
        prompt = {"model": "sim", "max_tokens": 2, "prompt": "the quick brown fox " * 200}

        def matched() -> int:
            request = urllib.request.Request(
                f"http://{router}:{port}/v1/completions",
                data=json.dumps(prompt).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"]
                return int(answer.headers["x-warmroute-matched-gpu"])

        matched()
        # Of a router that had begun before it knew the replicas' tokens, a later one is.
        wait_until(lambda: matched() > 0)
        # What Prometheus scrapes, without a key.
        for target in (f"{router}:{port}", f"{OWN_NETWORK}11:8000", f"{OWN_NETWORK}12:8090"):
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                assert b"# TYPE" in answer.read()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
