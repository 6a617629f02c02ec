"""The manifests for Kubernetes: each is valid, and together they make one fleet."""

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from cacheengine.settings.lmcache_file import load_engine_config
from router.cli.serve import leave_s
from router.config.loading import load_router_config
from router.config.settings import RouterConfig
from router.policy import METHODS, Plane, Policy, check_gateway
from tests.kubernetes_kinds import Manifest, check_manifest, container_of, gibibytes, ports
from tools.reference import known_commands
from warmroute_common.config_reader import ConfigLocation

FOLDER: Final = Path(__file__).parent.parent / "configs" / "kubernetes"
ANYWHERE: Final = "0.0.0.0"
OVERLAYS: Final = ("router", "router-monitored", "gateway")


def built(folder: Path) -> Iterator[Manifest]:
    """Yield what kustomize makes of a folder, as far as it is used here.

    `test_kustomize_builds_the_same` compares.
    """
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in (*asked.pop("resources", ()), *asked.pop("components", ())):
        there = folder / name
        if there.is_dir():
            yield from built(there)
        else:
            yield from yaml.safe_load_all(there.read_text())
    for each in asked.pop("configMapGenerator", ()):
        yield {**made("ConfigMap", each["name"]), "data": dict(files(folder, each))}
    for each in asked.pop("secretGenerator", ()):
        data = {name: encoded(text) for name, text in files(folder, each)}
        yield {**made("Secret", each["name"]), "type": "Opaque", "data": data}
    assert set(asked) <= {"apiVersion", "kind", "generatorOptions"}, asked


def made(kind: str, name: str) -> Manifest:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}


def files(folder: Path, generator: Manifest) -> Iterator[tuple[str, str]]:
    for each in generator["files"]:
        name, _, path = each.rpartition("=")
        yield name or path, (folder / path).read_text()


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@cache
def manifests(overlay: str) -> list[Manifest]:
    return list(built(FOLDER / "overlays" / overlay))


def of(overlay: str, kind: str, name: str) -> Any:
    [found] = [
        each
        for each in manifests(overlay)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def named(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def by_name(all_of_it: list[Manifest]) -> dict[str, Manifest]:
    return {named(each): each for each in all_of_it}


ALL: Final = [
    pytest.param(each, id=f"{overlay}-{named(each)}")
    for overlay in OVERLAYS
    for each in manifests(overlay)
]


@pytest.mark.parametrize("manifest", ALL)
def test_each_is_valid(manifest: Manifest) -> None:
    check_manifest(manifest)


def kustomize(folder: Path) -> list[Manifest]:
    """Build with the real one; skip the test where there is none."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The suffix is of the content of what is mounted: another one restarts the pods.
    text = re.sub(r"\bvllm-engine-[a-z0-9]{10}\b", "vllm-engine", done.stdout)
    found = list(yaml.safe_load_all(text))
    for each in found:
        if each["kind"] == "Secret":  # in lines, like an e-mail
            each["data"] = {name: "".join(text.split()) for name, text in each["data"].items()}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_the_same(overlay: str) -> None:
    assert by_name(kustomize(FOLDER / "overlays" / overlay)) == by_name(manifests(overlay))


def test_the_overlay_that_the_readme_shows_builds(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    mine = tmp_path / "kubernetes" / "overlays" / "mine"
    mine.mkdir()
    text = (FOLDER / "README.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (mine / "kustomization.yaml").write_text(block)
    (mine / "keys.yaml").write_text("keys: mine")
    (mine / "router.yaml").write_text("replicas: mine")
    built_mine = by_name(kustomize(mine))
    replicas = built_mine["StatefulSet-vllm"]["spec"]["template"]["spec"]["containers"][0]
    assert "--model=MODEL" in replicas["args"]
    assert not any("Qwen" in each for each in replicas["args"])
    assert replicas["image"] == "registry.example.com/warmroute-replica:0.1.0"
    assert built_mine["Secret-warmroute-keys"]["data"] == {"keys.yaml": encoded("keys: mine")}
    assert built_mine["ConfigMap-warmroute"]["data"] == {"router.yaml": "replicas: mine"}
    assert {each["metadata"]["namespace"] for each in built_mine.values()} == {"inference"}


def config_of(overlay: str, name: str, directory: Path) -> RouterConfig:
    """Return the settings in a ConfigMap, as they are read where it is mounted."""
    text = of(overlay, "ConfigMap", name)["data"]["router.yaml"]
    if overlay != "gateway":
        keys = of(overlay, "Secret", "warmroute-keys")["data"]["keys.yaml"]
        (directory / "keys.yaml").write_bytes(base64.b64decode(keys))
        assert "/etc/warmroute-keys/keys.yaml" in text
        text = text.replace("/etc/warmroute-keys", str(directory))
    path = directory / "router.yaml"
    path.write_text(text)
    return load_router_config(path)


@pytest.mark.parametrize(
    ("overlay", "config"), [("router", "warmroute"), ("gateway", "warmroute-picker")]
)
def test_pods_of_the_replicas_are_known_by_their_names(
    overlay: str, config: str, tmp_path: Path
) -> None:
    replicas = of(overlay, "StatefulSet", "vllm")
    service = of(overlay, "Service", replicas["spec"]["serviceName"])
    container = container_of(replicas)
    settings = config_of(overlay, config, tmp_path)
    count = replicas["spec"]["replicas"]
    names = [f"vllm-{number}.{service['metadata']['name']}" for number in range(count)]
    assert [urlsplit(each.url).netloc for each in settings.replicas] == [
        f"{name}:{ports(container)['http']}" for name in names
    ]
    assert service["spec"]["selector"] == replicas["spec"]["template"]["metadata"]["labels"]
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports(container)
    env = {each["name"]: each.get("value") for each in container["env"]}
    for name, each in zip(names, settings.replicas, strict=True):
        assert each.instance_id == name.partition(".")[0]
        assert each.hash_seed in (None, env["PYTHONHASHSEED"])
        if each.agent_url is None:
            assert each.kv_events == f"tcp://{name}:{ports(container)['kv-events']}"
            assert each.kv_replay == f"tcp://{name}:{ports(container)['kv-replay']}"
        else:
            assert each.agent_url == f"http://{name}:{ports(container)['agent']}"


def test_the_engines_file_is_what_its_pod_has_room_for() -> None:
    replicas = of("router", "StatefulSet", "vllm")
    container = container_of(replicas)
    [source] = of("router", "ConfigMap", "vllm-engine")["data"].items()
    assert source[0] == "engine.yaml"
    engine = load_engine_config(
        FOLDER / "base" / "replicas-engine" / "engine.yaml",
        environment={
            "LMCACHE_LMCACHE_INSTANCE_ID": "vllm-0",
            "LMCACHE_DISTRIBUTED_URL": f"10.0.0.1:{ports(container)['transfer']}",
            "WARMROUTE_FLEET_SECRET": "known-to-the-fleet-alone",
        },
    )
    variables = {each["name"] for each in container["env"] if each["name"].startswith("LMCACHE_")}
    assert variables == {"LMCACHE_LMCACHE_INSTANCE_ID", "LMCACHE_DISTRIBUTED_URL"}
    assert engine.lmcache_worker_port == ports(container)["agent"]
    assert engine.agent_host == "0.0.0.0"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert [str(each) for each in engine.local_disk] == [mounts["cache"]]
    [claim] = replicas["spec"]["volumeClaimTemplates"]
    assert engine.max_local_disk_size < gibibytes(claim["spec"]["resources"]["requests"]["storage"])
    volumes = {each["name"]: each for each in replicas["spec"]["template"]["spec"]["volumes"]}
    shared = gibibytes(volumes["shm"]["emptyDir"]["sizeLimit"])
    assert engine.max_local_cpu_size < shared
    assert shared < gibibytes(container["resources"]["requests"]["memory"])


def test_routers_and_replicas_have_one_fleet_secret() -> None:
    kinds = [("StatefulSet", "vllm"), ("Deployment", "warmroute")]
    [one, other] = [
        next(
            each["valueFrom"]["secretKeyRef"]
            for each in container_of(of("router", *kind))["env"]
            if each["name"] == "WARMROUTE_FLEET_SECRET"
        )
        for kind in kinds
    ]
    assert one == other == {"name": "warmroute-fleet", "key": "secret"}


@pytest.mark.parametrize(
    ("overlay", "kind", "name"),
    [
        ("router", "StatefulSet", "vllm"),
        ("router", "Deployment", "warmroute"),
        ("gateway", "Deployment", "warmroute-picker"),
    ],
)
def test_commands_are_ones_that_the_images_have(overlay: str, kind: str, name: str) -> None:
    """The images' entry point is ``warmroute``; files are where volumes bring them."""
    manifest = of(overlay, kind, name)
    container = container_of(manifest)
    command, *arguments = container["args"]
    context = known_commands()[command].make_context(command, arguments)
    path = Path(str(context.params["config_path"]))
    volumes = {each["name"]: each for each in manifest["spec"]["template"]["spec"]["volumes"]}
    [volume] = [
        volumes[each["name"]]
        for each in container["volumeMounts"]
        if each["mountPath"] == str(path.parent)
    ]
    assert path.name in of(overlay, "ConfigMap", volume["configMap"]["name"])["data"]


@pytest.mark.parametrize(
    ("overlay", "name"), [("router", "warmroute"), ("gateway", "warmroute-picker")]
)
def test_what_serves_is_safe_and_drains(overlay: str, name: str, tmp_path: Path) -> None:
    deployment = of(overlay, "Deployment", name)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    pod, container = deployment["spec"]["template"]["spec"], container_of(deployment)
    assert of(overlay, "Service", name)["spec"]["selector"] == labels
    assert of(overlay, "PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels
    settings = config_of(overlay, name, tmp_path)
    assert settings.shares_replicas is (deployment["spec"]["replicas"] > 1)
    timeouts = settings.timeouts
    assert settings.picker is not None or settings.host == ANYWHERE
    drained_s = leave_s(timeouts, ANYWHERE) + timeouts.drain_s
    assert drained_s > timeouts.drain_s
    assert drained_s < pod["terminationGracePeriodSeconds"] < drained_s + 30
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert {"requests", "limits"} == set(container["resources"])


def test_clients_reach_the_router_where_it_listens(tmp_path: Path) -> None:
    settings = config_of("router", "warmroute", tmp_path)
    container = container_of(of("router", "Deployment", "warmroute"))
    assert settings.port == ports(container)["http"]
    assert settings.access.keys
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    # It is 503 while no replica is up: a restart of the router would not help.
    assert "httpGet" not in container["livenessProbe"]
    [port] = of("router", "Service", "warmroute")["spec"]["ports"]
    assert port["targetPort"] == "http"
    monitor = of("router-monitored", "ServiceMonitor", "warmroute")["spec"]
    service = of("router-monitored", "Service", "warmroute")
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert [each["port"] for each in monitor["endpoints"]] == [port["name"]]


def test_only_routers_and_replicas_reach_the_replicas() -> None:
    policy = of("router", "NetworkPolicy", "vllm")["spec"]
    labels = {
        kind: of("router", kind, name)["spec"]["template"]["metadata"]["labels"]
        for kind, name in (("StatefulSet", "vllm"), ("Deployment", "warmroute"))
    }
    assert policy["podSelector"]["matchLabels"] == labels["StatefulSet"]
    [rule] = policy["ingress"]
    allowed = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert allowed == [labels["Deployment"], labels["StatefulSet"]]


def test_nobody_has_the_keys_that_are_here(tmp_path: Path) -> None:
    """They are not a hash of anything known, so that what is deployed as it is lets nobody in."""
    access = config_of("router", "warmroute", tmp_path).access
    assert [each.sha256 for each in access.keys] == ["0" * 64]
    assert access.admin_sha256 == ("f" * 64,)


def test_the_pool_asks_the_picker_where_it_listens(tmp_path: Path) -> None:
    pool = of("gateway", "InferencePool", "vllm")["spec"]
    asked = pool["endpointPickerRef"]
    service = of("gateway", "Service", asked["name"])["spec"]
    config = config_of("gateway", "warmroute-picker", tmp_path)
    assert config.picker is not None
    assert asked["port"]["number"] == config.picker.port == service["ports"][0]["port"]
    container = container_of(of("gateway", "Deployment", "warmroute-picker"))
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == config.picker.port
    [backend] = of("gateway", "HTTPRoute", "vllm")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "vllm")
    replicas = of("gateway", "StatefulSet", "vllm")
    assert pool["selector"]["matchLabels"] == replicas["spec"]["template"]["metadata"]["labels"]
    [port] = pool["targetPorts"]
    assert port["number"] == ports(container_of(replicas))["http"]


def test_the_route_opens_only_paths_that_clients_may_reach(tmp_path: Path) -> None:
    """With every picker stopped, the gateway forwards what its HTTPRoute matches."""
    config = config_of("gateway", "warmroute-picker", tmp_path)
    check_gateway(config, ConfigLocation("router.yaml"))
    policy = Policy(config)
    for rule in of("gateway", "HTTPRoute", "vllm")["spec"]["rules"]:
        for match in rule["matches"]:
            path = match["path"]["value"]
            for method in [match["method"]] if "method" in match else METHODS:
                policy.check(Plane.GATEWAY, method, path, {})
            if match["path"]["type"] != "Exact":
                assert path.count("/") > 1
                assert not [each for each in policy.refused() if each.startswith(f"{path}/")]
