"""The vLLM command that ``warmroute replica`` builds."""

import inspect
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cacheengine.launch import replica_command
from cacheengine.launch.replica_command import replica
from cacheengine.launch.vllm_launch import (
    ReplicaSettings,
    free_ports,
    hash_algorithm_of,
    openai_url_of,
    vllm_arguments,
    vllm_environment,
)


def option(command: list[str], name: str) -> dict[str, object]:
    """Return a JSON option's value."""
    value: dict[str, object] = json.loads(command[command.index(name) + 1])
    return value


def test_the_command_loads_our_spec_and_publishes_events() -> None:
    command = vllm_arguments(
        ["--model", "M", "--port", "8001", "--chat-template=t.jinja"],
        chunk_tokens=512,
        kv_events_port=7001,
        kv_replay_port=7002,
    )
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert "--model" in command
    transfer = option(command, "--kv-transfer-config")
    extra = transfer["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert transfer["kv_connector"] == "WarmrouteConnector"
    assert transfer["kv_connector_module_path"] == "cacheengine.connector.connector"
    assert extra["block_size"] == 512
    assert ReplicaSettings.from_extra_config(extra) == ReplicaSettings(
        kv_events_port=7001, kv_replay_port=7002, chat_template="t.jinja"
    )
    events = option(command, "--kv-events-config")
    # Without a wildcard vLLM would connect instead of binding.
    assert events["endpoint"] == "tcp://*:7001"
    assert events["replay_endpoint"] == "tcp://*:7002"


def test_nixl_connector_comes_before_ours() -> None:
    """KV that another replica lends is pulled; KV of this replica is not."""
    alone, both = (
        option(
            vllm_arguments([], chunk_tokens=512, kv_events_port=1, kv_replay_port=2, nixl=nixl),
            "--kv-transfer-config",
        )
        for nixl in (False, True)
    )
    assert both["kv_connector"] == "MultiConnector"
    assert both["kv_connector_extra_config"] == {
        "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, alone]
    }


def test_layers_with_windows_are_kept_like_the_others_unless_told() -> None:
    def launched(*vllm_args: str) -> list[str]:
        return vllm_arguments(vllm_args, chunk_tokens=256, kv_events_port=1, kv_replay_port=2)

    assert launched().count("--disable-hybrid-kv-cache-manager") == 1
    assert (
        launched("--disable_hybrid_kv_cache_manager").count("--disable-hybrid-kv-cache-manager")
        == 0
    ), "the user's own stands"
    told = launched("--no-disable-hybrid-kv-cache-manager")
    assert "--disable-hybrid-kv-cache-manager" not in told


@pytest.mark.parametrize(
    "taken",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv-events-config={}"],
        # vLLM takes these for the same.
        ["--kv_transfer_config", "{}"],
        ["--kv-events-config.publisher", "null"],
    ],
    ids=lambda t: t[0],
)
def test_options_that_the_launcher_sets_are_refused(taken: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--kv-.*-config: is set by `warmroute replica` itself"):
        vllm_arguments(taken, chunk_tokens=256, kv_events_port=1, kv_replay_port=2)


def test_the_hash_algorithm_is_read_from_vllms_options() -> None:
    assert hash_algorithm_of([]) == "sha256"
    assert hash_algorithm_of(["--prefix-caching-hash-algo", "xxhash"]) == "xxhash"
    assert hash_algorithm_of(["--prefix-caching-hash-algo=sha256_cbor"]) == "sha256_cbor"
    assert hash_algorithm_of(["--prefix_caching_hash_algo", "xxhash_cbor"]) == "xxhash_cbor"
    with pytest.raises(ValueError, match="'md5' is unknown; use sha256"):
        hash_algorithm_of(["--prefix-caching-hash-algo", "md5"])


@pytest.mark.parametrize(
    ("args", "url"),
    [
        ("", "http://:8000"),
        ("--port 8001", "http://:8001"),
        ("--port=8001 --host 0.0.0.0", "http://:8001"),
        ("--host 10.0.0.1", "http://10.0.0.1:8000"),
        ("--host fd00::1 --ssl-certfile c.pem", "https://[fd00::1]:8000"),
        ("--uds /tmp/socket", None),
    ],
)
def test_where_vllm_serves_is_read_from_its_options(args: str, url: str | None) -> None:
    assert openai_url_of(args.split()) == url
    made = vllm_environment({}, config_path="c", hash_algorithm="sha256", openai_url=url)
    assert made.get("LMCACHE_OPENAI_URL") == url


def test_a_random_seed_is_pinned_and_a_given_one_kept() -> None:
    def seed_of(environment: dict[str, str], algorithm: str) -> str | None:
        made = vllm_environment(environment, config_path="c", hash_algorithm=algorithm)
        assert made["LMCACHE_CONFIG_FILE"] == "c"
        return made.get("PYTHONHASHSEED")

    assert seed_of({}, "sha256") is None
    assert seed_of({}, "xxhash") == "0"
    assert seed_of({"PYTHONHASHSEED": "7"}, "xxhash_cbor") == "7"


def test_free_ports_are_none_that_the_kernel_gives_away() -> None:
    """vLLM takes its KV events' port 20 s after it was chosen, when others have taken dozens."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_ports(50)) < first_given


def test_a_port_on_which_somebody_listens_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports(1, in_a_row=2)
    monkeypatch.setattr("cacheengine.launch.vllm_launch._PORTS", range(taken, taken + 2))
    anew = inspect.unwrap(free_ports)  # the tests' own gives no port twice
    with socket.create_server(("", taken)):
        assert anew(1) == [taken + 1]
        with pytest.raises(ValueError, match="no 2 free ports"):
            anew(2)
    assert anew(1, besides={taken + 1}) == [taken]


def test_the_ports_of_kv_events_are_none_that_the_replica_takes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are chosen before the agent listens on its own."""
    (first,) = free_ports(1, in_a_row=6)
    agent, transfer, server, side_channel, *others = range(first, first + 6)
    monkeypatch.setattr("cacheengine.launch.vllm_launch._PORTS", range(first, first + 6))
    monkeypatch.setattr(replica_command, "free_ports", inspect.unwrap(free_ports))
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(side_channel))
    config = tmp_path / "instance.yaml"
    config.write_text(
        f"max_local_cpu_size: 0.1\nlmcache_worker_port: {agent}\n"
        f"distributed_url: localhost:{transfer}\n"
    )
    arguments = ["--config", str(config), "--print-command", "--", "--model", "M"]
    told = CliRunner().invoke(replica, [*arguments, "--port", str(server)])
    assert told.exit_code == 0, told.output
    command = shlex.split(told.output.splitlines()[-1])
    events = option(command, "--kv-events-config")
    assert {events["endpoint"], events["replay_endpoint"]} == {f"tcp://*:{p}" for p in others}


def good_config(tmp_path: Path) -> Path:
    path = tmp_path / "instance.yaml"
    path.write_text("max_local_cpu_size: 0.5\nlmcache_worker_port: 0\n")
    return path


def test_print_command_shows_what_would_run(tmp_path: Path) -> None:
    config = good_config(tmp_path)
    arguments = ["--config", str(config), "--print-command", "--", "--model", "M", "--port", "1"]
    result = CliRunner().invoke(replica, arguments)
    assert result.exit_code == 0, result.output
    assert f"LMCACHE_CONFIG_FILE={config}" in result.output
    assert "--model M --port 1 --kv-transfer-config" in result.output


def test_no_secret_is_printed_with_the_command(tmp_path: Path) -> None:
    arguments = ["--config", str(good_config(tmp_path)), "--print-command", "--", "--model", "M"]
    secrets = ["--api-key", "hidden", "--hf-token=hidden", "--port", "1"]
    result = CliRunner().invoke(replica, [*arguments, *secrets])
    assert result.exit_code == 0, result.output
    assert "hidden" not in result.output
    assert "--api-key '***' '--hf-token=***' --port 1" in result.output


@pytest.mark.parametrize(
    "wrong",
    [
        "remote_url: [hidden]",
        "remote_url: 'redis://:hidden'",
        "remote_url: 'foo://me:hidden@a'",
        "remote_url: 'redis://me:hidden@a:99999'",
        "controller_url: 'ftp://any:hidden@a'",
        "controller_url: {a: hidden}",
        "extra_config: hidden",
    ],
)
def test_no_secret_is_in_what_is_said_of_a_wrong_file(wrong: str, tmp_path: Path) -> None:
    config = good_config(tmp_path)
    config.write_text(f"{config.read_text()}{wrong}\n")
    arguments = ["--config", str(config), "--print-command", "--", "--model", "M"]
    result = CliRunner().invoke(replica, arguments)
    assert result.exit_code == 2
    assert "instance.yaml: " in result.output
    assert "hidden" not in result.output


def test_keys_that_can_be_forged_are_permitted_to_one_tenant(tmp_path: Path) -> None:
    config = good_config(tmp_path)
    config.write_text(config.read_text() + "single_tenant: true\n")
    arguments = ["--config", str(config), "--print-command", "--", "--model", "M"]
    hashing = ["--prefix-caching-hash-algo", "xxhash_cbor"]
    result = CliRunner().invoke(replica, [*arguments, *hashing])
    assert result.exit_code == 0, result.output


def test_a_taken_agent_port_is_found_before_vllm_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = tmp_path / "instance.yaml"
        config.write_text(f"lmcache_worker_port: {port}\n")
        result = CliRunner().invoke(replica, ["--config", str(config), "--", "--model", "M"])
    assert result.exit_code == 2
    assert f"lmcache_worker_port: cannot listen on 127.0.0.1:{port}" in result.output


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (
            "chunk_sise: 256",
            ["--model", "M"],
            "chunk_sise: unknown key; did you mean 'chunk_size'",
        ),
        ("max_local_cpu_size: 0", ["--model", "M"], "max_local_cpu_size:"),
        ("max_local_cpu_size: 5GB", ["--model", "M"], "max_local_cpu_size:"),
        ("local_disk: /proc/kv\nmax_local_disk_size: 1", ["--model", "M"], "local_disk:"),
        ("chunk_size: 256", ["--port", "1"], "--model: is missing"),
        (
            "chunk_size: 100",
            ["--model", "M", "--block-size", "64"],
            "chunk_size: 100 is not a multiple of vLLM's block size, 64; set 128, or vLLM's",
        ),
        (
            "chunk_size: 256",
            ["--model", "M", "--prefix-caching-hash-algo", "xxhash"],
            "single_tenant: is false, and with vLLM's --prefix-caching-hash-algo xxhash",
        ),
        ("chunk_size: 256", ["--model", "M", "--kv-events-config", "{}"], "--kv-events-config:"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    tmp_path: Path, config: str, arguments: list[str], message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(config + "\n")
    # A process of its own: if the check failed to refuse, this one would become vLLM.
    result = subprocess.run(
        [sys.executable, "-m", "router", "replica", "--config", str(path), "--", *arguments],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("warmroute replica: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
