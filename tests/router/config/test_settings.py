"""Settings are read strictly, and what is wrong is said in one line with its fix."""

import math
import re
from pathlib import Path

import aiohttp
import pytest

from router.config.credentials import load_fleet_secret
from router.config.loading import load_router_config
from router.config.settings import RouterConfig
from warmroute_common.config_reader import ConfigError, describe, live_settings

ONE = "replicas: [{url: 'http://a:1'}]\n"


def load(tmp_path: Path, text: str) -> RouterConfig:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return load_router_config(path)


def test_only_replicas_are_needed(tmp_path: Path) -> None:
    config = load(tmp_path, ONE)
    assert config.replicas[0].url == "http://a:1"
    assert config.replicas[0].name == "a:1"
    assert (config.host, config.port, config.policy) == ("127.0.0.1", 8080, "ttft")
    assert config.timeouts.first_byte_s is None


def test_every_level_is_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = load(
        tmp_path,
        """
        port: 9999
        policy: round-robin
        replicas:
          - url: http://a:1/v1/
            instance_id: one
            agent_url: http://a:2/
            kv_events: tcp://a:5557
            api_key: secret
        prefetch: {enabled: false, wait_cap_s: 1}
        tokenizer: {path: model, models: {other: {path: model}}, cache_directory: sent}
        timeouts: {first_byte_s: 30}
        """,
    )
    replica = config.replicas[0]
    assert replica.url == "http://a:1", "a trailing /v1 is what people paste; it is not ours"
    assert (replica.name, replica.agent_url) == ("one", "http://a:2")
    assert config.prefetch.wait_cap_s == 1.0 and isinstance(config.prefetch.wait_cap_s, float)
    assert config.tokenizer.path == str(tmp_path / "model"), "relative to the file"
    assert config.tokenizer.models["other"].path == str(tmp_path / "model")
    assert config.tokenizer.cache_directory == str(tmp_path / "sent")
    assert config.timeouts.first_byte_s == 30.0


def test_a_secret_is_not_printed(tmp_path: Path) -> None:
    config = load(tmp_path, "replicas: [{url: 'http://a:1', api_key: hidden}]")
    assert "hidden" not in repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "router.yaml: is empty; write settings as 'key: value' lines"),
        ("- 1", "router.yaml: holds a list at its top level; write settings as"),
        ("a: [1", "router.yaml: line 1: not valid YAML"),
        ("port: 1", "replicas: names no replica; add at least one '- url:"),
        ("replicas: []", "replicas: names no replica; add at least one '- url:"),
        ("replicas: http://a", "replicas: expected a list, got text; write one"),
        ("replicas: [http://a]", "replicas[0]: expected settings, got text; write"),
        ("replicas: [{uri: 'http://a'}]", "replicas[0].uri: unknown key; did you mean 'url'?"),
        ("replicas: [{instance_id: a}]", "replicas[0].url: is missing; add 'url: ...'"),
        ("replicas: [{url: 'a:1'}]", "replicas[0].url: 'a:1' is not an HTTP base URL; write it"),
        ("replicas: [{url: 'http://a:x'}]", "replicas[0].url: 'http://a:x' is not an HTTP"),
        ("replicas: [{url: 'http://[a'}]", "replicas[0].url: 'http://[a' is not an HTTP"),
        (
            "replicas: [{url: 'http://a'}, {url: 'http://a/'}]",
            "replicas[1]: has the same url as replicas[0] ('http://a'); give each",
        ),
        (
            "replicas: [{url: 'http://a', kv_events: 'tcp://*:5557'}]",
            "replicas[0].kv_events: 'tcp://*:5557' is an address to listen on, not to",
        ),
        (
            "replicas: [{url: 'http://a', kv_events: '5557'}]",
            "replicas[0].kv_events: '5557' is not a ZMQ endpoint; write it like tcp://",
        ),
        (ONE + "portt: 1", "portt: unknown key; did you mean 'port'?"),
        (
            ONE + "lmcache_coordinator: http://a:9300",
            "lmcache_coordinator: was removed; Warmroute does not ask another coordinator",
        ),
        (ONE + "zzz: 1", "zzz: unknown key; use one of host, port"),
        (ONE + "port: '80'", "port: expected a whole number, got the text '80'; write digits"),
        (ONE + "port: 70000", "port: 70000 is out of range; it must be at most 65535"),
        (ONE + "port: true", "port: expected a whole number, got true; write digits"),
        (ONE + "policy: tfft", "policy: unknown value 'tfft'; did you mean 'ttft'?"),
        (
            ONE + "max_body_bytes: 64MB",
            "max_body_bytes: expected a whole number of bytes, got the text '64MB'; write digits"
            " only, without a unit",
        ),
        (
            ONE + "timeouts: {connect_s: 5s}",
            "timeouts.connect_s: expected a number of seconds, got the text '5s'; write a number",
        ),
        (
            ONE + "rates: {disk_bytes_per_s: 10e9}",
            "rates.disk_bytes_per_s: expected a number of bytes per second, got the text '10e9';"
            " write 10000000000, since YAML takes '10e9' as text",
        ),
        (ONE + "timeouts: {connect_s: 0}", "timeouts.connect_s: 0.0 is out of range; it must be"),
        (ONE + "timeouts: {connect_s: .inf}", "timeouts.connect_s: inf is not a finite number"),
        (ONE + "admission: {ageing: 0}", "admission.ageing: 0.0 is out of range; it must be above"),
        (
            ONE + "timeouts: 5",
            "timeouts: expected settings, got a number; write 'key: value' lines",
        ),
        (
            ONE + "prefetch: {enabled: 'yes'}",
            "prefetch.enabled: expected true or false, got the text 'yes'; write true or false",
        ),
        (ONE + "host: ''", "host: is empty; give a value"),
        (ONE + "passthrough: [x]", "passthrough[0]: 'x' is not a path; write it like /path"),
        (
            ONE + "passthrough: [/a*/b]",
            "passthrough[0]: '/a*/b' is not a path; write it like /path",
        ),
        (
            ONE + "cors: {allow_origins: ['https://a.b/']}",
            "cors.allow_origins[0]: 'https://a.b/' is not an origin; write it like https://host",
        ),
        (ONE + "cors: {allow_origins: [a.b]}", "cors.allow_origins[0]: 'a.b' is not an origin"),
        (ONE + "controller:", "controller: is empty; write 'controller: {}' for its defaults"),
        (
            ONE + "controller: true",
            "controller: expected settings, got true or false; write 'key: value'",
        ),
        (ONE + "controller: {ports: 1}", "controller.ports: unknown key; did you mean 'port'?"),
        (ONE + "controller: {port: 70000}", "controller.port: 70000 is out of range; it must"),
        (ONE + "controller: {port: 8080}", "controller.port: 8080 is also port; choose another"),
        (
            ONE + "controller: {monitor_port: 9000}",
            "controller.monitor_port: 9000 is also controller.port; choose another",
        ),
        (ONE + "tokenizer: {path: nowhere}", "/nowhere); name an existing directory"),
        (
            ONE + "tokenizer: {models: {m: {path: gone}}}",
            "tokenizer.models.m.path: 'gone' does not",
        ),
        (
            "replicas: [{url: 'http://a', instance_id: x}, {url: 'http://b', instance_id: x}]",
            "its own instance_id",
        ),
        (
            "port: 1\nhost: a\nport: 2",
            "'port' is set in line 1 and again in line 3; put both under",
        ),
        (
            ONE + "access: {keys_file: a, keys_file: b}",
            "'keys_file' is set in line 2 and again in line 2",
        ),
        (
            ONE + "port: ${PORT}",
            "got the text '${PORT}'; write the value itself: variables such as",
        ),
        (
            "replicas: [{url: 'http://${HOST}:1'}]",
            "replicas[0].url: 'http://${HOST}:1' has a variable",
        ),
        (
            ONE + "port: !ENV PORT",
            "line 2: the tag '!ENV' is not supported; write the value itself",
        ),
        (
            ONE + "model_aliases: {a: b, b: a}",
            "model_aliases.a: 'b' is an alias itself; name a model",
        ),
        ("chunk_size: 256", "this is a replica's file, not the router's file; give the router's"),
        ("model: m\nreplicas: [{config: a}]", "with: warmroute up --config"),
    ],
)
def test_what_is_wrong_is_said_with_its_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    said = str(caught.value)
    assert message in said
    assert "\n" not in said
    assert said.startswith(str(tmp_path / "router.yaml"))
    assert caught.value.fix


def test_the_controller_is_off_unless_its_section_is_there(tmp_path: Path) -> None:
    assert load(tmp_path, ONE).controller is None
    controller = load(tmp_path, ONE + "controller: {}").controller
    assert controller is not None
    assert (controller.host, controller.port, controller.monitor_port) == ("127.0.0.1", 9000, 9001)


def test_any_free_port_may_be_taken_for_each(tmp_path: Path) -> None:
    config = load(tmp_path, ONE + "port: 0\ncontroller: {port: 0, monitor_port: 0}")
    assert config.controller is not None and config.controller.port == 0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file; check the path"):
        load_router_config(tmp_path / "nowhere.yaml")


def test_the_default_rates_are_usable() -> None:
    rates = RouterConfig(replicas=()).rates
    assert all(math.isfinite(value) for value in vars(rates).values())


def test_a_controller_that_is_open_to_other_machines_wants_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is open .* there is no secret"):
        load(tmp_path, ONE + "controller: {host: 0.0.0.0}")
    with pytest.raises(ConfigError, match=r"controller\.secret: is empty"):
        load(tmp_path, ONE + "controller: {host: 0.0.0.0, secret: ''}")
    config = load(tmp_path, ONE + "controller: {host: 0.0.0.0, secret: s3cret}")
    assert config.controller is not None
    assert "s3cret" not in repr(config)


def test_lmcache_wants_a_controller_and_no_agent_beside_it(tmp_path: Path) -> None:
    replica = "replicas: [{url: 'http://r', lmcache: 'http://r:8210/'"
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.lmcache: .* no controller"):
        load(tmp_path, f"{replica}}}]")
    config = load(tmp_path, f"{replica}}}]\ncontroller: {{}}")
    assert config.replicas[0].lmcache == "http://r:8210"
    with pytest.raises(ConfigError, match="either our engine or LMCache"):
        load(tmp_path, f"{replica}, agent_url: 'http://r:8090'}}]\ncontroller: {{}}")


SHA = "0123456789abcdef" * 4
OTHER_SHA = "f" * 64


def test_keys_of_a_file_are_taken_too(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(f"keys: [{{name: b, sha256: {OTHER_SHA}, models: [m]}}]")
    keys = f"keys: [{{name: a, sha256: {SHA}}}], keys_file: keys.yaml"
    access = load(tmp_path, f"{ONE}access: {{{keys}}}").access
    assert [(each.name, each.sha256) for each in access.keys] == [("a", SHA), ("b", OTHER_SHA)]
    assert access.keys[1].models == ("m",)


@pytest.mark.parametrize("day", ["2027-12-31", "'2027-12-31'"])
def test_a_day_may_be_a_date_of_yaml_or_text(tmp_path: Path, day: str) -> None:
    keys = f"keys: [{{name: a, sha256: {SHA}, valid_until: {day}}}]"
    (key,) = load(tmp_path, f"{ONE}access: {{{keys}}}").access.keys
    assert key.valid_until == "2027-12-31"


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("keys: [{name: a, sha256: secret}]", "access.keys[0].sha256: is not a SHA-256 in lower"),
        (f"admin_sha256: [{SHA}, x]", "access.admin_sha256[1]: is not a SHA-256"),
        (
            f"keys: [{{name: a, sha256: {SHA}}}, {{name: b, sha256: {SHA}}}]",
            f"access.keys[1].sha256: {SHA} is also access.keys[0].sha256; choose another",
        ),
        (
            f"keys: [{{name: a, sha256: {SHA}}}], admin_sha256: [{SHA}]",
            f"access.admin_sha256[0]: {SHA} is also access.keys[0].sha256",
        ),
        (
            f"keys: [{{name: a, sha256: {SHA}}}, {{name: a, sha256: {OTHER_SHA}}}]",
            "access.keys[1].name: a is also access.keys[0].name",
        ),
        (
            f"keys: [{{name: a, sha256: {SHA}, second_sha256: {SHA}}}]",
            f"access.keys[0].second_sha256: {SHA} is also access.keys[0].sha256",
        ),
        (
            f"keys: [{{name: a, sha256: {SHA}, valid_until: 2027-02-30}}]",
            "access.keys[0].valid_until: '2027-02-30' is not a date; write year, month and day",
        ),
        (
            f"keys: [{{name: a, sha256: {SHA}, valid_until: 2027-02-03 10:00:00}}]",
            "access.keys[0].valid_until: '2027-02-03 10:00:00' is not a date",
        ),
        ("keys_file: none.yaml", "access.keys_file: 'none.yaml' does not exist"),
        ("keys_file: empty.yaml", "empty.yaml: keys: names no key; make one with 'warmroute key"),
        ("metrics: opened", "access.metrics: unknown value 'opened'; did you mean 'open'?"),
    ],
)
def test_access_that_cannot_be_meant_so(tmp_path: Path, access: str, message: str) -> None:
    (tmp_path / "empty.yaml").write_text("keys: []")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"{ONE}access: {{{access}}}")
    assert message in str(caught.value)


def test_a_controller_open_to_others_is_guarded_by_an_admin_key_too(tmp_path: Path) -> None:
    open_to_others = f"{ONE}controller: {{host: 0.0.0.0}}\n"
    with pytest.raises(ConfigError, match="there is no secret"):
        load(tmp_path, open_to_others)
    assert load(tmp_path, f"{open_to_others}access: {{admin_sha256: [{SHA}]}}").controller


FLEET_SECRET = "known-to-the-fleet-alone"


@pytest.mark.parametrize("by", ["file", "variable"])
def test_a_fleet_secret_guards_a_controller_open_to_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    text = f"{ONE}controller: {{host: 0.0.0.0}}\n"
    if by == "file":
        (tmp_path / "secret").write_text(f"{FLEET_SECRET}\n")
        text += "fleet_secret_file: secret\n"
    else:
        monkeypatch.setenv("WARMROUTE_FLEET_SECRET", FLEET_SECRET)
    config = load(tmp_path, text)
    secret = load_fleet_secret(config)
    assert secret is not None
    assert secret.is_known_by(FLEET_SECRET)
    assert FLEET_SECRET not in repr(config)
    if by == "file":
        assert config.fleet_secret_file == str(tmp_path / "secret")


def test_fleet_secrets_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="fleet_secret_file: 'secret' does not exist"):
        load(tmp_path, f"{ONE}fleet_secret_file: secret")
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="fleet_secret_file: the fleet secret has 5 characters"):
        load(tmp_path, f"{ONE}fleet_secret_file: secret")
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", FLEET_SECRET)
    with pytest.raises(ConfigError, match="WARMROUTE_FLEET_SECRET is set too"):
        load(tmp_path, f"{ONE}fleet_secret_file: secret")
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", "short")
    with pytest.raises(ConfigError, match="WARMROUTE_FLEET_SECRET: the fleet secret has 5"):
        load(tmp_path, ONE)


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_bytes(b"port: 1\n# caf\xe9\n")
    with pytest.raises(ConfigError) as caught:
        load_router_config(path)
    assert str(caught.value) == f"{path}: line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"


def test_merged_keys_of_yaml_are_not_set_twice(tmp_path: Path) -> None:
    text = "replicas:\n- &one {url: 'http://a:1', api_key: k}\n- {<<: *one, url: 'http://b:1'}\n"
    assert [each.api_key for each in load(tmp_path, text).replicas] == ["k", "k"]


def test_live_settings_are_declared_at_their_fields() -> None:
    """The page of the reference lists them, and `Reload` takes a function for each."""
    assert live_settings(RouterConfig) == {
        *("access", "log_level", "model_aliases", "passthrough"),
        *("replica_tls", "replicas", "tls"),
    }


async def test_a_connection_that_fails_is_described_without_tls() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get("http://127.0.0.1:1")
    assert "ssl" not in describe(caught.value)
    assert describe(TimeoutError()) == "TimeoutError"


SECRET_PLACES = (
    "replicas: [{url: 'http://a:1', %s}]",
    ONE + "discovery: {dns: [{name: x}], each: {%s}}",
)


@pytest.mark.parametrize("text", SECRET_PLACES)
def test_a_replicas_key_may_be_in_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text("hidden\n")
    config = load(tmp_path, text % "api_key_file: key")
    assert "hidden" in (config.replicas[0].api_key, config.discovery.each.api_key)
    assert "hidden" not in repr(config)
    for wrong, found in (
        ("api_key_file: none", "api_key_file: 'none' does not exist"),
        ("api_key_file: key, api_key: x", "api_key_file: is set, and api_key too"),
        ("api_key_file: empty", "api_key_file: is not one line of text"),
        ("api_key_file: binary", "api_key_file: is not one line of text"),
    ):
        (tmp_path / "empty").write_text("\n")
        (tmp_path / "binary").write_bytes(b"\xff\n\x00")
        with pytest.raises(ConfigError, match=re.escape(found)):
            load(tmp_path, text % wrong)


def test_the_controllers_secret_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hidden\n")
    config = load(tmp_path, ONE + "controller: {secret_file: key}")
    assert config.controller is not None and config.controller.secret == "hidden"
