"""The wheel: what is in it, and that it runs with nothing but what the router's lock pins."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.replica.tiers import call, wait_until
from tools.relock import pinned

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SHIPPED = ("router", "cacheengine", "simulator", "replay", "warmroute_common")
NOT_CODE = {".pyc"}
COMMANDS = ("serve", "picker", "simulate", "replay", "up", "replica", "key", "explain", "top")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy: setuptools leaves its work next to the sources, and uses it again.

    The copy has no git either, which tells build backends what to take.
    """
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for package in (*SHIPPED, "bench", "tests", "tools"):
        shutil.copytree(
            ROOT / package,
            sources / package,
            ignore=shutil.ignore_patterns("__pycache__", "results"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    pip("wheel", *options, "--wheel-dir", str(built), str(sources))
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and of all else only what the router's lock pins."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False, symlinks=True)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    for name in pinned("router"):
        link_distribution(name, site_packages)
    pip("--python", str(python(directory)), "install", "--no-deps", "--no-index", "-q", str(wheel))
    return directory


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def python(environment: Path) -> Path:
    return environment / "bin" / "python"


def link_distribution(name: str, site_packages: Path) -> None:
    """Make what an installed distribution has at the top level be there, too."""
    distribution = importlib.metadata.distribution(name)
    files = distribution.files or []
    for top in {each.parts[0] for each in files if each.parts[0] not in ("..", "__pycache__")}:
        there = Path(str(distribution.locate_file(top)))
        if not (site_packages / top).exists():
            (site_packages / top).symlink_to(there)


@contextmanager
def running(environment: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the installed command; end it."""
    process = subprocess.Popen(
        [environment / "bin" / "warmroute", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=environment,
        env=bare_environment(),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def bare_environment() -> dict[str, str]:
    """Return this process's variables, without the ones that lead to the sources."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def said(environment: Path, *command: str) -> str:
    """Run something of the environment outside the sources; return what it printed."""
    done = subprocess.run(
        [environment / "bin" / command[0], *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=environment,
        env=bare_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_top_level_is_the_two_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {each.split("/")[0] for each in names}
    (about,) = {each for each in tops if each.endswith(".dist-info")}
    assert tops - {about} == set(SHIPPED)
    assert f"{about}/licenses/LICENSE" in names


def test_it_has_every_file_of_the_two_packages(wheel: Path) -> None:
    """Files that are not modules, too: type markers, and the files of the router's page."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        path.relative_to(ROOT).as_posix()
        for package in SHIPPED
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in NOT_CODE
    }
    assert {f"{package}/py.typed" for package in SHIPPED} <= names
    assert files - names == set()


def test_it_says_what_it_needs(wheel: Path) -> None:
    """Every package that the router's lock does not bring is behind an extra."""
    (about,) = (each for each in zipfile.ZipFile(wheel).namelist() if each.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(about).decode()
    lines = [each.removeprefix("Requires-Dist: ") for each in text.splitlines()]
    needed = [Requirement(each) for each in lines if f"Requires-Dist: {each}" in text.splitlines()]
    always = {canonicalize_name(each.name) for each in needed if "extra" not in str(each.marker)}
    assert always <= {canonicalize_name(each) for each in pinned("router")}
    assert "License-Expression: Apache-2.0" in text


@pytest.mark.parametrize(
    "command", ["serve", "picker", "simulate", "up", "replica", "key", "explain"]
)
def test_every_command_is_there(environment: Path, command: str) -> None:
    assert f"Usage: warmroute {command}" in said(environment, "warmroute", command, "--help")


def test_the_environment_has_no_more_than_a_router_needs(environment: Path) -> None:
    """Otherwise the other tests would show nothing; and what is imported comes from the wheel."""
    code = (
        "import importlib.util as u, router.app, router.cli.serve, simulator.simulate_command, sys;"
        "import json; print(json.dumps(["
        "[n for n in ('torch', 'vllm', 'numpy', 'grpc', 'bench', 'tests') if u.find_spec(n)],"
        "router.__file__, sorted(sys.modules)]))"
    )
    found, file, modules = json.loads(said(environment, "python", "-c", code))
    assert found == []
    assert Path(file).is_relative_to(environment)
    assert "torch" not in modules


def test_a_fleet_is_simulated_routed_and_asked(environment: Path, tmp_path: Path) -> None:
    """What the README begins with, of the wheel alone: simulate, serve, one request."""
    sizes = ["--gpu-tokens", "4096", "--cpu-tokens", "4096", "--disk-tokens", "0"]
    with running(environment, "simulate", "--replicas", "2", "--json", *sizes) as fleet:
        where = json.loads(stdout(fleet).readline())
        config = tmp_path / "router.yaml"
        config.write_text(json.dumps(configuration(where)))
        with running(environment, "serve", "--config", str(config)) as router:
            url = base_url(router)
            # A slow machine's router begins before it has asked its replicas.
            wait_until("the model is known", lambda: bool(call(f"{url}/v1/models")["data"]))
            (model,) = call(f"{url}/v1/models")["data"]
            asked = {"model": model["id"], "prompt": "say yes", "max_tokens": 3}
            answer = call(f"{url}/v1/completions", asked)
    assert answer["usage"]["completion_tokens"] == 3


def configuration(where: dict[str, Any]) -> dict[str, Any]:
    """Return a router's configuration for a fleet, on a free port."""
    told = ("url", "agent_url", "instance_id")
    replicas = [{name: each[name] for name in told} for each in where["replicas"]]
    return {"port": 0, "replicas": replicas, "rates": where["router_rates"]}


def stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def base_url(router: subprocess.Popen[str]) -> str:
    """Return where a router listens, once it says so."""
    assert router.stderr is not None
    lines = []
    for line in router.stderr:
        lines.append(line)
        if "OPENAI_BASE_URL=" in line:
            return line.split("OPENAI_BASE_URL=")[1].strip().removesuffix("/v1")
    raise AssertionError("".join(lines))
