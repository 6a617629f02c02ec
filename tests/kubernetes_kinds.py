"""What a manifest of Kubernetes may be: the schemas of its kinds, and questions to its parts."""

from typing import Any, Final

import kubernetes_validate
from jsonschema import Draft202012Validator

Manifest = dict[str, Any]
CORE_VERSION: Final = "1.37"

NAME: Final = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT: Final = {"type": "string", "minLength": 1}
TEXTS: Final = {"type": "object", "additionalProperties": TEXT}
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


LABELS: Final = {
    "type": "object",
    "additionalProperties": {
        "type": "string",
        "pattern": "^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$",
    },
    "minProperties": 1,
}
REFERENCE: Final = record(
    "name", group=NAME | {"pattern": "^[a-z.0-9]+$"}, kind={}, name=NAME, namespace=NAME
)
DURATION: Final = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
MATCH: Final = record(
    "path",
    method={"enum": ["GET", "POST"]},
    path=record("type value", type={"enum": ["Exact", "PathPrefix"]}, value={"pattern": "^/"}),
)
_CUSTOM_SPECS: Final = {
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
    "monitoring.coreos.com/v1 ServiceMonitor": record(
        "selector endpoints",
        selector=record("matchLabels", matchLabels=LABELS),
        endpoints=listed(
            record(
                "port",
                port=NAME,
                path={"type": "string", "pattern": "^/"},
                interval={"type": "string", "pattern": "^[0-9]+(s|m|h)$"},
                scheme={"enum": ["http", "https"]},
                tlsConfig=record("insecureSkipVerify", insecureSkipVerify={"type": "boolean"}),
                authorization=record(
                    "credentials", credentials=record("name key", name=NAME, key={})
                ),
            ),
            16,
        ),
    ),
    "monitoring.coreos.com/v1 PrometheusRule": record(
        "groups",
        groups=listed(
            record(
                "name rules",
                name=TEXT,
                rules=listed(
                    record(
                        "alert expr labels annotations",
                        alert=TEXT,
                        expr=TEXT,
                        labels=TEXTS,
                        annotations=TEXTS,
                        **{"for": DURATION},
                    ),
                    1000,
                ),
            ),
            100,
        ),
    ),
    "keda.sh/v1alpha1 ScaledObject": record(
        "scaleTargetRef triggers",
        scaleTargetRef=record("name", apiVersion=TEXT, kind=TEXT, name=NAME),
        minReplicaCount={"type": "integer", "minimum": 0},
        maxReplicaCount={"type": "integer", "minimum": 1},
        triggers=listed(
            record(
                "type metadata",
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=record(
                    "serverAddress query threshold",
                    serverAddress=TEXT,
                    query=TEXT,
                    threshold=TEXT,
                    activationThreshold=TEXT,
                ),
            ),
            16,
        ),
    ),
}
"""What these APIs say of the ``spec`` of their kinds, as far as it is used here: their published
schemas are in no package for Python."""


def check_manifest(manifest: Manifest) -> None:
    """Raise an exception for a manifest that its kind does not allow."""
    spec = _CUSTOM_SPECS.get(f"{manifest['apiVersion']} {manifest['kind']}")
    if spec is None:
        kubernetes_validate.validate(manifest, CORE_VERSION, strict=True)
        return
    metadata = record("name", name=NAME, labels=LABELS)
    whole = record("metadata spec", apiVersion={}, kind={}, metadata=metadata, spec=spec)
    Draft202012Validator(whole).validate(manifest)


def container_of(manifest: Manifest) -> Manifest:
    """Return the only container of a Deployment or StatefulSet."""
    [found] = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def ports(container: Manifest) -> dict[str, int]:
    """Return a container's ports by their names."""
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def gibibytes(text: str) -> int:
    """Return the number in a size such as 16Gi."""
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))
