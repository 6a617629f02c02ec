"""The Helm chart: what it renders for each of its examples is valid, and makes one fleet."""

import http.server
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from cacheengine.settings.lmcache_file import load_engine_config
from router.cli.serve import leave_s
from router.config.loading import load_router_config
from router.config.settings import RouterConfig
from router.gateway.envoy_config import envoy_configuration
from router.policy import check_gateway
from tests.kubernetes_kinds import Manifest, check_manifest, container_of, gibibytes, ports
from tests.servers import missing
from tools.reference import known_commands
from warmroute_common.config_reader import ConfigLocation

CONFIGS: Final = Path(__file__).parent.parent / "configs"
CHART: Final = CONFIGS / "helm" / "warmroute"
EXAMPLES: Final = sorted(path.stem for path in CHART.glob("examples/*.yaml"))
RELEASE: Final = "mine"
NAME: Final = "mine-warmroute"
FROM_OUTSIDE: Final = {
    "small": set[str](),
    "production": {"warmroute-tls", "warmroute-fleet", "vllm-api-key", "hugging-face", "models"},
    "stock-vllm": {"warmroute-keys", "tokenizers", "models"},
    "envoy": {"vllm-api-key"},
    "gateway": set[str](),
}
"""Secrets and volumes that each example expects in the cluster."""
KEY: Final = {"name": "a", "sha256": "0" * 64}


def helm() -> Any:
    """Return Helm: its own code, as a library."""
    if importlib.util.find_spec("helm_python") is None:
        missing("helm-python-sdk", "pip install --require-hashes -r requirements/dev.lock")
    return importlib.import_module("helm_python")


def values(example: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text())
    return loaded


def rendered(given: dict[str, Any]) -> list[Manifest]:
    """Return what the chart makes of values; raise Helm's exception if it refuses them."""
    with helm().Chart.load(CHART) as chart:
        texts = chart.render(given, name=RELEASE, namespace="models")
    pieces = (yaml.safe_load_all(text) for path, text in texts.items() if path.endswith(".yaml"))
    return [each for piece in pieces for each in piece if each]


@cache
def manifests(example: str) -> list[Manifest]:
    return rendered(values(example))


def of_kind(example: str, kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests(example) if each["kind"] == kind}


def pods_of(example: str) -> dict[str, Manifest]:
    """Return the Deployments and StatefulSets, by name."""
    return of_kind(example, "Deployment") | of_kind(example, "StatefulSet")


def containers(workload: Manifest) -> list[Manifest]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]]


def volumes(workload: Manifest) -> dict[str, Manifest]:
    pod = workload["spec"]["template"]["spec"]
    return {each["name"]: each for each in pod["volumes"]}


def selected(labels: Manifest, workload: Manifest) -> bool:
    return bool(labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items())


def config_of(example: str, directory: Path) -> RouterConfig:
    """Return the settings in the ConfigMap, with mounted files in a directory of the test."""
    text = of_kind(example, "ConfigMap")[NAME]["data"]["router.yaml"]
    keys = directory / "etc" / "warmroute-keys"
    keys.mkdir(parents=True)
    made = of_kind(example, "Secret").get(
        f"{NAME}-keys", {"stringData": {"keys.yaml": yaml.safe_dump({"keys": [KEY]})}}
    )
    (keys / "keys.yaml").write_text(made["stringData"]["keys.yaml"])
    (directory / "etc" / "warmroute-replica").mkdir()
    (directory / "etc" / "warmroute-replica" / "api-key").write_text("known-to-routers")
    (directory / "etc" / "warmroute-tls").mkdir()
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=test"
    files = "-keyout etc/warmroute-tls/tls.key -out etc/warmroute-tls/tls.crt"
    command = ["openssl", *f"{new} {files}".split()]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    (directory / "var" / "lib" / "tokenizers" / "qwen3-8b").mkdir(parents=True)
    for folder in ("/etc/warmroute-", "/var/lib/tokenizers"):
        text = text.replace(folder, f"{directory}{folder}")
    path = directory / "router.yaml"
    path.write_text(text)
    return load_router_config(path)


def test_there_are_five_examples_at_least() -> None:
    assert len(EXAMPLES) >= 5
    assert set(FROM_OUTSIDE) == set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_manifest_is_valid(example: str) -> None:
    made = manifests(example)
    for each in made:
        check_manifest(each)
    keys = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert len(set(keys)) == len(keys) > 8


def test_the_values_that_the_readme_shows_are_valid() -> None:
    text = (CHART.parent / "README.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    made = rendered(yaml.safe_load(block))
    for each in made:
        check_manifest(each)
    [replicas] = [each for each in made if each["kind"] == "StatefulSet"]
    assert replicas["spec"]["replicas"] == 3
    assert container_of(replicas)["image"].startswith("registry.example.com/inference/")


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_finds_nothing_wrong(example: str) -> None:
    report = helm().lint(CHART, values(example), strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_is_mounted_is_there(example: str) -> None:
    in_chart = {
        each["metadata"]["name"]
        for each in manifests(example)
        if each["kind"] in ("Secret", "ConfigMap")
    }
    named = set()
    for workload in pods_of(example).values():
        there = volumes(workload)
        claims = {
            each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())
        }
        mounted = set()
        for container in containers(workload):
            mounts = [each["name"] for each in container["volumeMounts"]]
            paths = [each["mountPath"] for each in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)
            mounted |= set(mounts)
            for variable in container.get("env", ()):
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    named.add(variable["valueFrom"]["secretKeyRef"]["name"])
        assert mounted == set(there) | claims
        for volume in there.values():
            named |= {
                volume[kind][key]
                for kind, key in (
                    ("configMap", "name"),
                    ("secret", "secretName"),
                    ("persistentVolumeClaim", "claimName"),
                )
                if kind in volume
            }
    assert named - in_chart == FROM_OUTSIDE[example]


@pytest.mark.parametrize("example", EXAMPLES)
def test_selectors_find_their_pods_and_no_others(example: str) -> None:
    pods = pods_of(example)
    for name, workload in pods.items():
        labels = workload["spec"]["selector"]["matchLabels"]
        assert [other for other, each in pods.items() if selected(labels, each)] == [name]
    for name, service in of_kind(example, "Service").items():
        found = [
            other for other, each in pods.items() if selected(service["spec"]["selector"], each)
        ]
        assert found == [name]
        known = (
            {port for each in containers(pods[name]) if "ports" in each for port in ports(each)}
            if found
            else set()
        )
        for port in service["spec"]["ports"]:
            assert str(port.get("targetPort", port["name"])) in known
    for budget in of_kind(example, "PodDisruptionBudget").values():
        labels = budget["spec"]["selector"]["matchLabels"]
        assert [each for each, pod in pods.items() if selected(labels, pod)] == [NAME]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_routers_file_loads_and_finds_the_replicas(example: str, tmp_path: Path) -> None:
    config = config_of(example, tmp_path)
    replicas = of_kind(example, "StatefulSet")
    kubernetes = config.discovery.kubernetes
    if values(example).get("front") == "envoy":
        assert kubernetes is None
        expected = [
            f"{name}-{number}.{each['spec']['serviceName']}:8000"
            for name, each in replicas.items()
            for number in range(each["spec"]["replicas"])
        ]
        assert [urlsplit(each.url).netloc for each in config.replicas] == expected
        assert all(each.api_key == "known-to-routers" for each in config.replicas)
        return
    assert kubernetes is not None
    assert kubernetes.selector is not None
    wanted = dict(each.split("=") for each in kubernetes.selector.split(","))
    services = of_kind(example, "Service")
    found = [
        name
        for name, each in services.items()
        if wanted.items() <= each["metadata"]["labels"].items()
    ]
    assert set(found) == set(replicas)
    for name in found:
        # The router takes the port with this name.
        assert {"name": "http", "port": 8000} in services[name]["spec"]["ports"]
        known = ports(container_of(replicas[name]))
        each = config.discovery.each
        assert each.agent_port == known.get("agent")
        if each.agent_port is None:
            assert (each.kv_events_port, each.kv_replay_port) == (5557, 5558)
            assert each.hash_seed == "0"
    [role] = of_kind(example, "Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    router = of_kind(example, "Deployment")[NAME]["spec"]["template"]["spec"]
    assert router["serviceAccountName"] in of_kind(example, "ServiceAccount")
    assert router["automountServiceAccountToken"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_routers_and_pickers_serve_where_they_are_asked(example: str, tmp_path: Path) -> None:
    config = config_of(example, tmp_path)
    deployment = of_kind(example, "Deployment")[NAME]
    pod = deployment["spec"]["template"]["spec"]
    front = values(example).get("front", "router")
    known = {each["name"]: each for each in pod["containers"]}
    if front == "router":
        assert ports(known["router"]) == {"http": config.port}
        assert config.host == "0.0.0.0"
        probe = known["router"]["readinessProbe"]["httpGet"]
        assert probe["scheme"] == ("HTTPS" if config.tls else "HTTP")
    else:
        check_gateway(config, ConfigLocation("router.yaml"))
        assert config.picker is not None
        served = {"grpc": config.picker.port, "picker-http": config.picker.http_port}
        assert ports(known["picker"]) == served
    if front == "envoy":
        envoy = envoy_configuration(config, ConfigLocation("router.yaml"))
        [listener] = envoy["static_resources"]["listeners"]
        address = listener["address"]["socket_address"]
        assert address["address"] == "0.0.0.0"
        assert ports(known["envoy"]) == {"http": address["port_value"]}
    scaled = deployment["spec"].get("replicas", 2)
    assert config.shares_replicas is (scaled > 1)
    drained_s = leave_s(config.timeouts, "0.0.0.0") + config.timeouts.drain_s
    assert drained_s < pod["terminationGracePeriodSeconds"]
    for container in containers(deployment):
        assert container["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_commands_are_ones_that_the_images_have(example: str) -> None:
    for workload in pods_of(example).values():
        for container in containers(workload):
            if "warmroute-" not in container["image"]:
                continue
            words = container.get("args") or container["command"][-1].split(" > ")[0].split()[1:]
            command, *arguments = words
            context = known_commands()[command].make_context(command, list(arguments))
            path = Path(str(context.params["config_path"]))
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            source = volumes(workload)[mounts[str(path.parent)]]["configMap"]["name"]
            assert path.name in of_kind(example, "ConfigMap")[source]["data"]


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each != "stock-vllm"])
def test_the_engines_file_is_what_its_pods_have_room_for(example: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(of_kind(example, "ConfigMap")[f"{NAME}-replica"]["data"]["engine.yaml"])
    for replicas in of_kind(example, "StatefulSet").values():
        container = container_of(replicas)
        engine = load_engine_config(
            path,
            environment={
                "LMCACHE_LMCACHE_INSTANCE_ID": "vllm-0",
                "LMCACHE_DISTRIBUTED_URL": f"10.0.0.1:{ports(container)['transfer']}",
                "WARMROUTE_FLEET_SECRET": "known-to-the-fleet-alone",
            },
        )
        assert engine.lmcache_worker_port == ports(container)["agent"]
        shared = gibibytes(volumes(replicas)["shm"]["emptyDir"]["sizeLimit"])
        assert engine.max_local_cpu_size < shared
        assert shared < gibibytes(container["resources"]["requests"]["memory"])
        claims = replicas["spec"].get("volumeClaimTemplates", [])
        assert bool(claims) is bool(engine.local_disk)
        for claim in claims:
            size = gibibytes(claim["spec"]["resources"]["requests"]["storage"])
            assert engine.max_local_disk_size < size
            mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            assert [str(each) for each in engine.local_disk] == [mounts[claim["metadata"]["name"]]]


@pytest.mark.parametrize("example", EXAMPLES)
def test_replicas_are_guarded_and_drained(example: str) -> None:
    [policy] = of_kind(example, "NetworkPolicy").values()
    pods = pods_of(example)
    labels = policy["spec"]["podSelector"]["matchLabels"]
    found = {name for name, each in pods.items() if selected(labels, each)}
    assert found == set(of_kind(example, "StatefulSet"))
    [rule] = policy["spec"]["ingress"]
    own = [each["podSelector"]["matchLabels"] for each in rule["from"] if "podSelector" in each]
    assert [selected(own[0], each) for each in pods.values()] == [True] * len(pods)
    assert len(rule["from"]) == 1 + len(values(example).get("networkPolicy", {}).get("from", []))
    for each in of_kind(example, "StatefulSet").values():
        program, path, url, limit_s = container_of(each)["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "python3"
        scripts = of_kind(example, "ConfigMap")[f"{NAME}-replica"]["data"]
        assert scripts[Path(path).name] == (CHART / "files" / "drain.py").read_text()
        assert urlsplit(url).port == ports(container_of(each))["http"]
        grace = each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert float(limit_s) < grace


def test_who_is_scaled_has_no_fixed_number() -> None:
    """Each upgrade of the release would set it back."""
    scaled = of_kind("production", "HorizontalPodAutoscaler") | of_kind(
        "production", "ScaledObject"
    )
    assert set(scaled) == {NAME, f"{NAME}-small"}
    for name, each in pods_of("production").items():
        assert ("replicas" in each["spec"]) is (name not in scaled)
        if name in scaled:
            target = scaled[name]["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) == (each["kind"], name)


def test_keda_asks_what_the_documentation_shows() -> None:
    page = (CONFIGS.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ +query: (.*)$", page[page.index("apiVersion: keda.sh") :], re.MULTILINE)
    scaled = of_kind("production", "ScaledObject")[f"{NAME}-small"]
    asked = [each["metadata"]["query"] for each in scaled["spec"]["triggers"]]
    small = next(each for each in values("production")["models"] if each["name"] == "small")
    labels = f'namespace="models", model="{small["model"]}"'
    assert asked == [each.replace('model="MODEL"', labels) for each in shown[: len(asked)]]


def test_monitoring_finds_routers_agents_and_vllm() -> None:
    services = of_kind("production", "Service")
    scraped = {
        (name, endpoint["port"])
        for monitor in of_kind("production", "ServiceMonitor").values()
        for name, each in services.items()
        if monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        for endpoint in monitor["spec"]["endpoints"]
    }
    replicas = (f"{NAME}-large", f"{NAME}-small")
    assert scraped == {(NAME, "http"), *((each, "http") for each in replicas)} | {
        (each, "agent") for each in replicas
    }
    for name, port in scraped:
        assert port in {each["name"] for each in services[name]["spec"]["ports"]}
    [rule] = of_kind("production", "PrometheusRule").values()
    alerts = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yaml").read_text())
    assert rule["spec"] == alerts
    board = of_kind("production", "ConfigMap")[f"{NAME}-dashboard"]["data"]["warmroute.json"]
    assert board.strip() == (CONFIGS / "grafana" / "warmroute.json").read_text().strip()


def test_the_gateway_opens_the_paths_that_the_kustomize_overlay_opens() -> None:
    """`tests/test_kubernetes.py` checks that these are ones that clients may reach."""
    [route] = of_kind("gateway", "HTTPRoute").values()
    theirs = CONFIGS / "kubernetes" / "base" / "picker" / "gateway.yaml"
    [other] = [
        each for each in yaml.safe_load_all(theirs.read_text()) if each["kind"] == "HTTPRoute"
    ]
    assert route["spec"]["rules"][0]["matches"] == other["spec"]["rules"][0]["matches"]
    [pool] = of_kind("gateway", "InferencePool").values()
    [replicas] = of_kind("gateway", "StatefulSet").values()
    assert selected(pool["spec"]["selector"]["matchLabels"], replicas)
    asked = pool["spec"]["endpointPickerRef"]
    service = of_kind("gateway", "Service")[asked["name"]]
    assert asked["port"]["number"] in [each["port"] for each in service["spec"]["ports"]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "access: nobody could use the router"),
        ({"acess": {"open": True}}, "'acess' not allowed"),
        ({"access": {"open": True}, "router": {"replica": 3}}, "'replica' not allowed"),
        ({"access": {"keys": [{"name": "a", "sha256": "secret"}]}}, "does not match pattern"),
        ({"access": {"keys": [KEY], "existingSecret": "x"}}, "remove one of the two"),
        ({"front": "envoy", "access": {"keys": [KEY]}}, "does not see clients' keys"),
        ({"front": "envoy", "tls": {"secretName": "x"}}, "has to do TLS"),
        ({"front": "envoy", "modelDefaults": {"autoscaling": {"enabled": True}}}, "is fixed"),
        ({"front": "envoy", "router": {"config": {"replicas": [{}]}}}, "names the replicas"),
        ({"front": "gateway"}, "networkPolicy.from: the gateway must reach"),
        (
            {"front": "gateway", "networkPolicy": {"enabled": False}, "ingress": {"enabled": True}},
            "HTTPRoute leads",
        ),
        (
            {
                "front": "envoy",
                "monitoring": {"serviceMonitors": True},
                "replicaApiKey": {"existingSecret": "x"},
            },
            "would show it to the cluster",
        ),
        (
            {"access": {"open": True}, "models": [{"name": "a", "model": "m"}] * 2},
            "two have the name a",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(helm().HelmError) as caught:
        rendered(given)
    assert said in str(caught.value)


def test_the_chart_is_of_the_version_that_the_images_have() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CONFIGS.parent / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project


# --- drain.py, which replicas run before they are stopped


def drain_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drain", CHART / "files" / "drain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def vllm_with(requests: list[tuple[int, int]]) -> Iterator[tuple[str, list[int]]]:
    """Serve vLLM's metrics; each answer has the next numbers of running and waiting requests."""
    asked: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            running, waiting = requests[min(len(asked), len(requests) - 1)]
            asked.append(running + waiting)
            labels = '{engine="0",model_name="org/model"}'
            text = (
                f"# TYPE vllm:num_requests_running gauge\n"
                f"vllm:num_requests_running{labels} {running}.0\n"
                f"vllm:num_requests_waiting{labels} {waiting}.0\n"
                f'vllm:num_requests_waiting_by_reason{{reason="x"}} 7.0\n'
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_replica_is_stopped_when_its_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = drain_script()
    waited: list[float] = []
    monkeypatch.setattr(drain.time, "sleep", waited.append)
    with vllm_with([(2, 1), (0, 1), (1, 0), (0, 0), (5, 5)]) as (url, asked):
        drain.main(url, 60.0)
    assert asked == [3, 1, 1, 0]
    assert waited[0] == drain.NOTICED_S


def test_a_replica_that_is_gone_or_never_idle_holds_nobody_up() -> None:
    drain = drain_script()
    with vllm_with([(1, 0)]) as (url, asked):
        drain.main(url, 0.0)
        assert asked == []
    drain.main(url, 0.01)  # nobody listens there any longer


def test_the_drain_script_runs_without_any_package() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            CHART / "files" / "drain.py",
            "http://127.0.0.1:1/metrics",
            "0",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
