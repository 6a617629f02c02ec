"""The manifests for Kubernetes: each is valid, and together they make one fleet."""

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from router.config.loading import router_config

FOLDER: Final = Path(__file__).parent.parent / "configs" / "kubernetes"
CORE_VERSION: Final = "1.37"

NAME: Final = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PORT: Final = {"type": "integer", "minimum": 1, "maximum": 65535}


def record(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a mapping that has these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


LABELS: Final = {"type": "object", "additionalProperties": NAME, "minProperties": 1}
REFERENCE: Final = record("name", group=NAME | {"pattern": "^[a-z.0-9]+$"}, kind={}, name=NAME)
DURATION: Final = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
MATCH: Final = record("path", path=record("type value", type={"const": "PathPrefix"}, value={}))
OF_GATEWAYS: Final = {
    "inference.networking.k8s.io/v1 InferencePool": record(
        "selector targetPorts endpointPickerRef",
        selector=record("matchLabels", matchLabels=LABELS),
        targetPorts=listed(record("number", number=PORT), 8),
        endpointPickerRef=record(
            "name port",
            name=NAME,
            port=record("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    "gateway.networking.k8s.io/v1 HTTPRoute": record(
        "parentRefs rules",
        parentRefs=listed(REFERENCE, 32),
        rules=listed(
            record(
                "backendRefs",
                matches=listed(MATCH, 64),
                backendRefs=listed(REFERENCE, 16),
                timeouts=record("request", request=DURATION),
            ),
            16,
        ),
    ),
}
"""What these APIs say of the ``spec`` of their kinds, as far as it is used here: their published
schemas are in no package for Python."""


def manifests() -> list[dict[str, Any]]:
    files = sorted(FOLDER.glob("*.yaml"))
    return [each for path in files for each in yaml.safe_load_all(path.read_text())]


def of(kind: str, name: str) -> Any:
    [found] = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: str(each["kind"]))
def test_each_is_valid(manifest: dict[str, Any]) -> None:
    spec = OF_GATEWAYS.get(f"{manifest['apiVersion']} {manifest['kind']}")
    if spec is None:
        kubernetes_validate.validate(manifest, CORE_VERSION, strict=True)
    else:
        whole = record(
            "metadata spec", apiVersion={}, kind={}, metadata=record("name", name=NAME), spec=spec
        )
        Draft202012Validator(whole).validate(manifest)


def test_the_picker_knows_the_pods_of_the_pool_by_their_names() -> None:
    replicas, pool = of("StatefulSet", "vllm"), of("InferencePool", "vllm")["spec"]
    settings = yaml.safe_load(of("ConfigMap", "warmroute-picker")["data"]["router.yaml"])
    config = router_config(settings, path="picker.yaml")
    service = replicas["spec"]["serviceName"]
    names = [f"vllm-{number}.{service}" for number in range(replicas["spec"]["replicas"])]
    [port] = pool["targetPorts"]
    assert [urlsplit(each.url).netloc for each in config.replicas] == [
        f"{name}:{port['number']}" for name in names
    ]
    pod = replicas["spec"]["template"]
    assert pod["metadata"]["labels"] == pool["selector"]["matchLabels"]
    assert of("Service", service)["spec"]["selector"] == pool["selector"]["matchLabels"]
    [container] = pod["spec"]["containers"]
    seeds = [each["value"] for each in container["env"] if each["name"] == "PYTHONHASHSEED"]
    assert seeds == [config.replicas[0].hash_seed] == [config.replicas[1].hash_seed]


def test_the_pool_asks_the_picker_where_it_listens() -> None:
    pool = of("InferencePool", "vllm")["spec"]["endpointPickerRef"]
    deployment = of("Deployment", "warmroute-picker")["spec"]
    service = of("Service", pool["name"])["spec"]
    settings = yaml.safe_load(of("ConfigMap", "warmroute-picker")["data"]["router.yaml"])
    config = router_config(settings, path="picker.yaml")
    assert config.picker is not None
    assert config.shares_replicas is (deployment["replicas"] > 1)
    assert pool["port"]["number"] == config.picker.port == service["ports"][0]["port"]
    [container] = deployment["template"]["spec"]["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == config.picker.port
    assert deployment["template"]["metadata"]["labels"] == service["selector"]
    [backend] = of("HTTPRoute", "vllm")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "vllm")
