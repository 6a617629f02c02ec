"""The command line: help, files, mistakes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from router.api.access import sha256_of
from router.cli import commands as plugins
from router.cli.commands import main
from router.config.loading import load_router_config
from warmroute_common.config_reader import ConfigError


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(args))
    return result.exit_code, result.output


@pytest.fixture
def router_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text("replicas: [{url: 'http://127.0.0.1:1', api_key: hidden}]\n")
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("drain", "one", "--wait-s", "abc"), "'abc' is not a valid number"),
        (("drain", "one", "--wait-s", "-1"), "-1.0 is not in the range 0<=x<=3600"),
        (("serve", "--port", "80.5"), "'80.5' is not a valid whole number"),
        (("simulate", "--speed", "abc"), "'abc' is not a valid number"),
    ],
)
def test_a_number_of_no_use_is_explained(args: tuple[str, ...], message: str) -> None:
    code, output = invoke(*args)
    assert code == 2 and message in output


def test_help_lists_every_command_plugins_included() -> None:
    code, output = invoke("--help")
    assert code == 0
    for command in (
        "serve",
        "picker",
        "up",
        "explain",
        "doctor",
        "top",
        "key",
        "check-config",
        "replica",
    ):
        assert f"\n  {command} " in output
    assert "(unavailable" not in output


@pytest.mark.parametrize(
    "command",
    ["serve", "picker", "up", "explain", "doctor", "top", "key", "check-config", "replica"],
)
def test_each_command_has_help(command: str) -> None:
    code, output = invoke(command, "--help")
    assert code == 0
    assert output.startswith(f"Usage: main {command}")


def test_a_plugin_that_cannot_be_imported_spares_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    broken = EntryPoint("broken", "no_such_package.cli:run", "warmroute.commands")
    monkeypatch.setattr(plugins, "_plugins", lambda: [broken])
    code, output = invoke("--help")
    assert code == 0
    assert "broken" in output and "(unavailable: No module named" in output
    code, output = invoke("broken", "--option", "x")
    assert code == 1
    assert "'broken' cannot be used here: No module named 'no_such_package'" in output


def test_an_unknown_command() -> None:
    code, output = invoke("swerve")
    assert code == 2
    assert "No such command 'swerve'" in output


def test_check_config_prints_what_would_be_used(router_yaml: Path) -> None:
    code, output = invoke("check-config", str(router_yaml))
    assert code == 0
    shown = json.loads(output)
    assert shown["replicas"][0]["url"] == "http://127.0.0.1:1"
    assert shown["timeouts"]["connect_s"] == 5.0
    assert shown["replicas"][0]["api_key"] == "***"
    assert shown["controller"] is None
    router_yaml.write_text(router_yaml.read_text() + "controller: {port: 9100, secret: s3cret}\n")
    shown = json.loads(invoke("check-config", str(router_yaml))[1])
    expected = {"host": "127.0.0.1", "port": 9100, "monitor_port": 9001, "secret": "***"}
    assert shown["controller"] == expected | {"secret_file": None}


def test_check_config_says_how_to_check_a_replicas_file(tmp_path: Path) -> None:
    path = tmp_path / "instance.yaml"
    path.write_text("chunk_size: 256\n")
    code, output = invoke("check-config", str(path))
    assert code == 2
    assert f"warmroute replica --config {path} --print-command" in output


@pytest.mark.parametrize("command", [["serve", "--config"], ["check-config"], ["up", "--config"]])
def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("replicass: []\n")
    code, output = invoke(*command, str(path))
    assert code == 2
    line = output.strip()
    assert line.startswith(f"{path}: ") and "\n" not in line and "; " in line


def test_serve_needs_a_replica() -> None:
    code, output = invoke("serve")
    assert code == 2
    assert (
        output == "warmroute serve: no replica is configured; give --config FILE or --replica URL\n"
    )


def test_serve_refuses_a_bad_url() -> None:
    code, output = invoke("serve", "--replica", "localhost:8000")
    assert code == 2
    assert "'localhost:8000' is not an HTTP base URL; write it like http://host:8000" in output


def test_explain_without_a_router() -> None:
    code, output = invoke("explain", "--router", "http://127.0.0.1:1", "hello")
    assert code == 1
    assert "no router answers at http://127.0.0.1:1" in output
    assert "warmroute serve" in output


def test_explain_with_half_a_body() -> None:
    code, output = invoke("explain", '{"model": ')
    assert code == 1
    assert "begins with '{' but is not JSON" in output


def test_plugins_are_commands() -> None:
    assert isinstance(main, click.Group)


def test_the_light_commands_do_not_load_the_server() -> None:
    code = (
        "import sys, router.cli.commands; print(sorted({'aiohttp', 'uvloop'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_m_router_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "router", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("warmroute, version ")


@pytest.mark.parametrize(
    ("args", "section"),
    [(["team"], "keys"), (["team: [1]", "--"], "keys"), (["--admin"], "admin_sha256")],
)
def test_a_made_key_is_known_once_its_entry_is_pasted(
    tmp_path: Path, args: list[str], section: str
) -> None:
    made = CliRunner().invoke(main, ["key", *args])
    assert made.exit_code == 0
    key = made.stderr.partition("key: ")[2].partition("\n")[0]
    assert len(key) == 46 and key not in made.stdout
    assert f"access.{section}" in made.stderr
    path = tmp_path / "router.yaml"
    path.write_text(
        f"replicas: [{{url: 'http://127.0.0.1:1'}}]\naccess:\n  {section}:\n{made.stdout}"
    )
    access = load_router_config(path).access
    known = access.admin_sha256 if section == "admin_sha256" else (access.keys[0].sha256,)
    assert known == (sha256_of(key),)


@pytest.mark.parametrize("args", [["team"], ["--admin"]])
@pytest.mark.parametrize(
    "before", ["", "access:\n  keys:\n  - {name: a, sha256: %s}\n" % ("0" * 64)]
)
def test_what_key_prints_never_replaces_keys_when_appended(
    tmp_path: Path, args: list[str], before: str
) -> None:
    """It prints a list item: at the end of a file that is refused, or is one more entry."""
    path = tmp_path / "router.yaml"
    text = "replicas: [{url: 'http://127.0.0.1:1'}]\n" + before
    path.write_text(text + CliRunner().invoke(main, ["key", *args]).stdout)
    try:
        names = [each.name for each in load_router_config(path).access.keys]
    except ConfigError:
        return
    assert before and names[0] == "a"


@pytest.mark.parametrize(
    ("command", "text", "found"),
    [
        (
            ["serve"],
            "replicas: []\nport: 1\n\nport: 2\n",
            "'port' is set in line 2 and again in line 4",
        ),
        (
            ["up"],
            "model: m\nrouter:\n  port: 1\n  port: 2\n",
            "'port' is set in line 3 and again in line 4",
        ),
        (
            ["replica", "--print-command"],
            "chunk_size: 256\nchunk_size: 16\n",
            "line 1 and again in line 2",
        ),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused_with_both_lines(
    tmp_path: Path, command: list[str], text: str, found: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    code, output = invoke(*command, "--config", str(path))
    assert code == 2 and found in output


@pytest.mark.parametrize("args", [[], ["team", "--admin"]])
def test_a_key_is_for_a_client_or_for_administration(args: list[str]) -> None:
    code, output = invoke("key", *args)
    assert code == 2
    assert "give the client's NAME, or --admin" in output


def test_no_secret_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "replicas:\n"
        "- {url: 'http://me:hidden@127.0.0.1:1', api_key: hidden, agent_url: 'http://:hidden@a:2'}\n"
        "- {url: 'https://hid%2Fden@127.0.0.1:3/base'}\n"
        "discovery: {dns: [{name: x}], each: {api_key: hidden}}\n"
        "controller: {secret: hidden}\n"
        "tracing: {endpoint: 'http://me:hidden@127.0.0.1:4'}\n"
    )
    code, output = invoke("check-config", str(path))
    assert code == 0, output
    assert "hidden" not in output and "hid%2Fden" not in output
    assert json.loads(output)["replicas"][0]["url"] == "http://***@127.0.0.1:1"


def test_no_secret_of_a_fleet_is_printed(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("max_local_cpu_size: 1\n")
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "model: m\n"
        "vllm_args: [--api-key, hidden, --hf-token=hidden]\n"
        "env: {HF_TOKEN: hidden, A: all}\n"
        "replicas: [{config: one.yaml, port: 1, env: {VLLM_API_KEY: hidden}}]\n"
        "router: {controller: {secret: hidden}, rates: {kv_bytes_per_token: 9}}\n"
    )
    code, output = invoke("check-config", str(path))
    assert code == 0, output
    assert "hidden" not in output
    shown = json.loads(output)
    assert shown["env"] == {"HF_TOKEN": "***", "A": "all"}
    assert shown["vllm_args"] == ["--api-key", "***", "--hf-token=***"]
    assert shown["router"]["rates"] == {"kv_bytes_per_token": 9}


@pytest.mark.parametrize(
    "wrong",
    [
        "controller: {secret: 4711}",
        "controller: {secret: [hidden]}",
        "controller: hidden",
        "access: {keys: [hidden]}",
        "access: {admin_sha256: hidden}",
        "access: {admin_sha256: [hidden]}",
        "access: {keys: [{name: a, sha256: hidden}]}",
        "tracing: {endpoint: 'ftp://me:hidden@a'}",
        "discovery: {kubernetes: {service: a, api_url: 'x://me:hidden@a'}}",
        "discovery: {each: {api_key: 4711}}",
        "api_key: hidden",
        "controller: {secret: hid: den}",
        "replicas: [{url: 'http://me:hidden@a/v1?b'}]",
        "replicas: [{url: 'http://a', agent_url: 'http://me:hidden@a:b'}]",
        "replicas: [{url: 'http://a', kv_events: 'tcp://me:hidden@a'}]",
        "replicas: [{url: 'http://me:hidden@a'}, {url: 'http://me:hidden@a'}]",
        "replicas: ['http://me:hidden@a']",
        "replicas: [{url: 'http://a', api_key: 4711}]",
    ],
)
def test_no_secret_is_in_what_is_said_of_a_wrong_file(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("replicas: [{url: 'http://a'}]\n" * (not wrong.startswith("rep")) + wrong)
    code, output = invoke("check-config", str(path))
    assert code == 2
    assert "router.yaml: " in output
    assert not re.search("hidden|4711|den}", output)


def test_a_configuration_of_envoy_is_printed(router_yaml: Path) -> None:
    made = yaml.safe_load(invoke("picker", "-c", str(router_yaml), "--print-envoy")[1])
    clusters = {each["name"]: each for each in made["static_resources"]["clusters"]}
    assert set(clusters) == {"replicas", "picker"}
    code, output = invoke("picker", "-r", "https://host/base", "--print-envoy")
    assert code == 2 and "replicas[0].url: 'https://host/base' is more than a host" in output
    router_yaml.write_text(router_yaml.read_text() + "picker: {port: 0}\n")
    code, output = invoke("picker", "-c", str(router_yaml), "--print-envoy")
    assert code == 2 and "picker.port: 0 means any free port; set a fixed port" in output
