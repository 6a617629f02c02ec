"""The settings of the controls: the controller, heartbeats and transfers."""

import logging
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from cacheengine.launch.replica_command import replica
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import load_engine_config
from warmroute_common.addresses import join_host_port, split_host_port
from warmroute_common.config_reader import ConfigError

SECRET = "known-to-the-fleet-alone"


def load(tmp_path: Path, text: str) -> EngineConfig:
    path = tmp_path / "instance.yaml"
    path.write_text(text)
    return load_engine_config(path, environment={})


def test_lmcaches_documented_example_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(
        tmp_path,
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5\nenable_controller: true\n"
        'lmcache_instance_id: "lmcache_instance_1"\ncontroller_url: "localhost:9001"\n'
        'lmcache_worker_port: 8001\ndistributed_url: "localhost:8004"\n',
    )
    assert config.controller_base_url == "http://localhost:9001"
    assert config.transfer_address == ("localhost", 8004)
    assert config.lmcache_worker_heartbeat_time == 10.0
    assert not caplog.records


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("https://router.internal:9001/", "https://router.internal:9001"),
        ("http://10.0.0.1:9001", "http://10.0.0.1:9001"),
        ("[fd00::1]:9001", "http://[fd00::1]:9001"),
        ("http://any:s3cret@10.0.0.1:9001", "http://any:s3cret@10.0.0.1:9001"),
    ],
)
def test_controller_urls(tmp_path: Path, url: str, base: str) -> None:
    config = load(tmp_path, f"enable_controller: true\ncontroller_url: '{url}'")
    assert config.controller_base_url == base


def test_a_secret_in_the_controller_s_url_is_not_shown(tmp_path: Path) -> None:
    config = load(tmp_path, "enable_controller: true\ncontroller_url: http://any:s3cret@a:9001")
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize("url", ["http://a:8000", "https://[fd00::1]:8000", "http://:8000"])
def test_urls_of_the_openai_server(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, f"openai_url: '{url}/'").openai_url == url


def test_without_enable_controller_its_url_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load(tmp_path, "controller_url: localhost:9001")
    assert config.controller_base_url is None
    assert "controller_url: has no effect without enable_controller: true" in caplog.text


def test_without_distributed_url_nothing_is_served(tmp_path: Path) -> None:
    assert load(tmp_path, "").transfer_address is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enable_controller: true", "controller_url is not set; .* localhost:9001"),
        ("controller_url: localhost", "does not end in a colon and a port"),
        ("openai_url: localhost:8000", "is not an HTTP URL"),
        ("openai_url: http://localhost", "does not end in a colon and a port"),
        ("openai_url: http://a:8000/v1", "does not end in a colon and a port"),
        ("controller_url: tcp://localhost:9001", "is not an HTTP address"),
        ("controller_url: http://localhost:9001/path", "does not end in a colon and a port"),
        ("distributed_url: 8004", "does not end in a colon and a port .* localhost:8004"),
        ("distributed_url: ':8004'", "has no host name"),
        ("distributed_url: 'localhost:65536'", "does not end in a colon and a port"),
        ("distributed_url: 'fd00::1:8004'", "an IPv6 address without brackets"),
        ("lmcache_worker_heartbeat_time: 0", "0 s is out of range"),
        ("lmcache_worker_heartbeat_time: 4000", "an hour at most"),
        ("lmcache_worker_heartbeat_time: soon", "'soon' is not a number"),
    ],
)
def test_mistakes_are_named_with_what_to_write(tmp_path: Path, text: str, message: str) -> None:
    key = text.partition(":")[0]
    with pytest.raises(ConfigError, match=f"instance.yaml: {key}: .*{message}"):
        load(tmp_path, text)


def test_addresses_survive_the_round_trip() -> None:
    for text in ("localhost:0", "[::1]:80", "10.0.0.1:65535"):
        assert join_host_port(*split_host_port(text)) == text


@pytest.mark.parametrize("key", ["lmcache_worker_port", "distributed_url"])
def test_a_taken_port_is_found_before_the_model_is_loaded(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = port if key == "lmcache_worker_port" else f"127.0.0.1:{port}"
        path = tmp_path / "instance.yaml"
        other = "" if key == "lmcache_worker_port" else "lmcache_worker_port: 0\n"
        path.write_text(f"max_local_cpu_size: 0.01\n{other}{key}: {value}\n")
        arguments = ["--config", str(path), "--print-command", "--", "--model", "m"]
        result = CliRunner().invoke(replica, arguments)
    assert result.exit_code == 2
    assert f"{key}: cannot listen on 127.0.0.1:{port} (Address already in use)" in result.output


def test_an_address_of_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", SECRET)
    path = tmp_path / "instance.yaml"
    path.write_text(
        "max_local_cpu_size: 0.01\nlmcache_worker_port: 0\ndistributed_url: 192.0.2.1:8004\n"
    )
    result = CliRunner().invoke(replica, ["--config", str(path), "--", "--model", "m"])
    assert result.exit_code == 2
    assert "distributed_url: cannot listen on 192.0.2.1:8004" in result.output


# --- the fleet secret ---

OPEN = {
    "agent_host": "agent_host: 0.0.0.0",
    "distributed_url": "distributed_url: 10.0.0.1:8004",
}


@pytest.mark.parametrize("key", OPEN)
def test_listening_to_others_wants_a_secret(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, OPEN[key])
    host = "0.0.0.0" if key == "agent_host" else "10.0.0.1"
    assert refused.value.key == key
    assert str(refused.value).endswith(
        f"{key}: {host} can be reached from other machines, and there is no fleet secret; set "
        "fleet_secret_file, or the variable WARMROUTE_FLEET_SECRET, to the same at router and "
        "replicas, or listen on 127.0.0.1"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "[::1]"])
def test_loopback_wants_none(tmp_path: Path, host: str) -> None:
    assert load(tmp_path, f"agent_host: '{host}'").fleet_secret is None


@pytest.mark.parametrize("text", OPEN.values())
def test_a_secret_comes_from_a_file_or_the_environment(tmp_path: Path, text: str) -> None:
    file, config = tmp_path / "secret", tmp_path / "instance.yaml"
    file.write_text(f"{SECRET}\n")
    config.write_text(text)
    by_variable = load_engine_config(config, environment={"WARMROUTE_FLEET_SECRET": SECRET})
    by_name = load_engine_config(config, environment={"LMCACHE_FLEET_SECRET_FILE": str(file)})
    by_key = load(tmp_path, f"{text}\nfleet_secret_file: {file}")
    for each in (by_variable, by_name, by_key):
        assert each.fleet_secret is not None
        assert each.fleet_secret.is_known_by(SECRET)
        assert SECRET not in repr(each)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read \\(No such file"),
        ("", "has 0 characters, not 16 to 512; make one: openssl rand -hex 32"),
        ("too short", "has spaces"),
        ("short", "has 5 characters"),
        ("x" * 513, "has 513 characters"),
        ("secrét-secrét-secrét", "other than printable ASCII"),
    ],
)
def test_secrets_that_cannot_be_used(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"instance.yaml: fleet_secret_file: .*{message}"):
        load(tmp_path, f"fleet_secret_file: {file}")


def test_two_secrets_are_one_too_many(tmp_path: Path) -> None:
    config = tmp_path / "instance.yaml"
    config.write_text("fleet_secret_file: secret")
    with pytest.raises(ConfigError, match="WARMROUTE_FLEET_SECRET is set too; take one of them"):
        load_engine_config(config, environment={"WARMROUTE_FLEET_SECRET": SECRET})


def test_the_secret_is_in_no_argument_of_the_replica_s_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", SECRET)
    path = tmp_path / "instance.yaml"
    path.write_text("max_local_cpu_size: 0.01\nlmcache_worker_port: 0\nagent_host: 0.0.0.0\n")
    arguments = ["--config", str(path), "--print-command", "--", "--model", "m"]
    result = CliRunner().invoke(replica, arguments)
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
