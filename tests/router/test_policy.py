"""The rules for clients' requests, the same for the proxy and for a gateway."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from click.testing import CliRunner

from router.cli.commands import main
from router.config.settings import (
    AccessConfig,
    CorsConfig,
    DiscoveredConfig,
    DiscoveryConfig,
    KeyConfig,
    PickerConfig,
    ReplicaConfig,
    RouterConfig,
    TlsConfig,
)
from router.launch.fleet_file import load_fleet_file
from router.policy import METHODS, NOT_CANONICAL, Plane, Policy, Route, check_gateway
from warmroute_common.api_errors import ApiError
from warmroute_common.config_reader import ConfigError, ConfigLocation

REPLICA = ReplicaConfig(url="http://10.0.0.1:8000")
CONFIG = RouterConfig(replicas=(REPLICA,))
KEY = KeyConfig(name="team", sha256="0" * 64)

NOT_ENFORCED: dict[str, tuple[str, dict[str, Any]]] = {
    "access": ("access.keys", {"access": AccessConfig(keys=(KEY,))}),
    "tls": ("tls", {"tls": TlsConfig(cert_file="cert.pem")}),
    "model_aliases": ("model_aliases", {"model_aliases": {"gpt": "m"}}),
    "cors": ("cors", {"cors": CorsConfig(allow_origins=("*",))}),
}
"""By the name that waives it, the key in the file and settings that a gateway does not enforce."""


@pytest.mark.parametrize("waiver", NOT_ENFORCED)
def test_a_setting_that_a_gateway_does_not_enforce_is_refused_unless_waived(waiver: str) -> None:
    key, changes = NOT_ENFORCED[waiver]
    config = replace(CONFIG, **changes)
    with pytest.raises(ConfigError) as caught:
        check_gateway(config, ConfigLocation("router.yaml"))
    assert str(caught.value).startswith(f"router.yaml: {key}: ")
    assert f"'{waiver}' to picker.waive" in str(caught.value)
    picker = replace(config.picker or PickerConfig(), waive=(waiver,))  # type: ignore[arg-type]
    check_gateway(replace(config, picker=picker), ConfigLocation("router.yaml"))


WITH_KEYS = {
    "replicas[0].api_key": replace(CONFIG, replicas=(replace(REPLICA, api_key="secret"),)),
    "discovery.each.api_key": replace(
        CONFIG, discovery=DiscoveryConfig(each=DiscoveredConfig(api_key="secret"))
    ),
}
TLS = PickerConfig(host="0.0.0.0", certificate="server.pem", key="server.key")


@pytest.mark.parametrize("key", WITH_KEYS)
@pytest.mark.parametrize(
    ("picker", "is_safe"),
    [
        (PickerConfig(), True),
        (PickerConfig(host="::1"), True),
        (PickerConfig(host="0.0.0.0"), False),
        (TLS, False),
        (replace(TLS, client_ca="ca.pem"), True),
    ],
)
def test_replicas_keys_leave_only_for_loopback_or_a_gateway_with_a_certificate(
    key: str, picker: PickerConfig, is_safe: bool
) -> None:
    at = ConfigLocation("router.yaml")
    if is_safe:
        check_gateway(replace(WITH_KEYS[key], picker=picker), at)
        return
    with pytest.raises(ConfigError, match=r"set picker\.certificate, key and client_ca") as caught:
        check_gateway(replace(WITH_KEYS[key], picker=picker), at)
    assert caught.value.key == key


def test_a_plain_configuration_is_accepted() -> None:
    check_gateway(CONFIG, ConfigLocation("router.yaml"))


@pytest.mark.parametrize("option", [[], ["--print-envoy"]])
def test_the_picker_does_not_start_without_the_keys_that_the_file_asks_for(
    tmp_path: Path, option: list[str]
) -> None:
    path = tmp_path / "router.yaml"
    settings: dict[str, Any] = {
        "host": "0.0.0.0",
        "replicas": [{"url": REPLICA.url}],
        "access": {"keys": [{"name": "team", "sha256": "0" * 64}]},
    }
    path.write_text(yaml.safe_dump(settings))
    done = CliRunner().invoke(main, ["picker", "-c", str(path), *option])
    assert done.exit_code == 2
    assert "access.keys: are not checked behind a gateway" in done.output
    path.write_text(yaml.safe_dump({**settings, "picker": {"waive": ["access"]}}))
    done = CliRunner().invoke(main, ["picker", "-c", str(path), "--print-envoy"])
    assert done.exit_code == 0


def test_a_fleet_does_not_start_behind_envoy_with_keys(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("max_local_cpu_size: 1\n")
    settings = {
        "model": "m",
        "log_dir": str(tmp_path),
        "replicas": [{"config": "one.yaml", "port": 8001}],
        "router": {"model_aliases": {"gpt": "m"}},
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(settings))
    load_fleet_file(path)
    with pytest.raises(ConfigError, match=r"router\.model_aliases: are not replaced behind"):
        load_fleet_file(path, by_envoy=True)


def test_a_waiver_is_one_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    settings = {"replicas": [{"url": REPLICA.url}], "picker": {"waive": ["x"]}}
    path.write_text(yaml.safe_dump(settings))
    done = CliRunner().invoke(main, ["picker", "-c", str(path), "--print-envoy"])
    assert done.exit_code == 2 and "picker.waive[0]: unknown value 'x'" in done.output


# --- routes and checks agree

SEGMENTS = ["v1", "v2", "chat", "completions", "files", "load_lora_adapter", "score", "sleep", "x"]
SEGMENTS += ["", ".", "..", "a%2Fb", "%2e%2e", "load%5flora_adapter", "mine", "responses", "ping"]
SEGMENTS += ["..;", "x;y", "..\\x", "x%5cy", "%252e", "x%00", "Load_LoRA_adapter"]


def route_of(policy: Policy, method: str, path: str) -> Route | None:
    """Return the route that a gateway takes for a raw path, by the rules that Envoy has."""
    if re.fullmatch(NOT_CANONICAL, path) or path.lower() in policy.refused():
        return None
    for each in policy.routes():
        fits = path.startswith(each.path) if each.is_prefix else path == each.path
        if fits and method in each.methods:
            return each
    return None


def is_allowed(policy: Policy, method: str, path: str) -> bool:
    try:
        policy.check(Plane.GATEWAY, method, unquote(path), {})
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("passthrough", [(), ("/mine/*", "/v1/load_lora_adapter", "/x y")])
def test_a_gateway_forwards_nothing_that_the_router_refuses(passthrough: tuple[str, ...]) -> None:
    policy = Policy(replace(CONFIG, passthrough=passthrough))
    parts = [each for n in (1, 2) for each in itertools.product(SEGMENTS, repeat=n)]
    parts += [("v1", *each) for each in itertools.product(SEGMENTS, repeat=2)]
    paths = ["/" + "/".join(each) for each in parts]
    for path in [*paths, *(each.path for each in policy.routes()), "/x%20y", "/%78%20y"]:
        for method in (*METHODS, "TRACE"):
            route = route_of(policy, method, path)
            if route is not None:
                assert is_allowed(policy, method, path), (method, path)
                asked = policy.parse(Plane.GATEWAY, method, unquote(path), {}, b"{}")
                assert route.repeatable <= asked.repeatable, (method, path)
            elif is_allowed(policy, method, path):
                # Another spelling of a path, or a method that its endpoint does not have.
                assert re.fullmatch(NOT_CANONICAL, path) or "%" in path, (method, path)


@pytest.mark.parametrize(
    ("method", "path", "replicas"),
    [
        ("POST", "/v1/chat/completions", 2),
        ("POST", "/v1/score", 2),
        ("GET", "/v1/files", 2),
        ("DELETE", "/v1/files/file-1", 2),
        ("POST", "/v1/files", 1),
        ("POST", "/v1/batches", 1),
        ("PATCH", "/v1/score2", 1),
    ],
)
@pytest.mark.parametrize("plane", Plane)
def test_a_request_that_must_not_be_repeated_goes_to_one_replica(
    plane: Plane, method: str, path: str, replicas: int
) -> None:
    policy = Policy(CONFIG)
    assert policy.replicas(policy.parse(plane, method, path, {}, b"{}")) == replicas
    route = route_of(policy, method, path)
    assert route is not None and route.repeatable is (replicas > 1)


def test_aliases_are_replaced_by_the_proxy_only() -> None:
    policy = Policy(replace(CONFIG, model_aliases={"gpt": "m"}))
    body = b'{"model":"gpt","prompt":"x"}'
    by_proxy = policy.parse(Plane.PROXY, "POST", "/v1/completions", {}, body)
    assert (by_proxy.model, by_proxy.body) == ("m", b'{"model":"m","prompt":"x"}')
    by_gateway = policy.parse(Plane.GATEWAY, "POST", "/v1/completions", {}, body)
    assert (by_gateway.model, by_gateway.body) == ("gpt", body)


def test_limits_are_those_of_the_file() -> None:
    limits = Policy(CONFIG).limits
    assert limits.body_bytes == CONFIG.max_body_bytes
    assert limits.held_s == CONFIG.admission.max_wait_s + CONFIG.prefetch.wait_cap_s
    assert limits.replicas == 2
