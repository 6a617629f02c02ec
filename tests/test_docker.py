"""The images: what they are made of, and what they run. (There is no Docker here to build them.)"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest
import yaml

from router.config.settings import PickerConfig, RouterConfig
from tools.reference import known_commands
from tools.relock import LOCKS

ROOT: Final = Path(__file__).parent.parent
FILES: Final = ("Dockerfile", "replica.Dockerfile")
TAGGED: Final = re.compile(r"[a-z0-9/-]+:\d+\.\d+\.\d+[a-z0-9.-]*")


@dataclass
class Stage:
    """One ``FROM``, with what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def said(self, word: str) -> list[str]:
        return [text for each, text in self.steps if each == word]


def stages(file: str) -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    text = (ROOT / "configs" / "docker" / file).read_text(encoding="utf-8")
    lines = [each for each in text.splitlines() if not each.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = stage = Stage(base, name)
        elif word:
            stage.steps.append((word, " ".join(rest.split())))
    return found


def lineage(file: str, name: str) -> Iterator[Stage]:
    """Yield a stage and its base stages, the nearest first."""
    known = stages(file)
    while name in known:
        yield known[name]
        name = known[name].base


def last(file: str, name: str, word: str) -> str:
    """Return what holds in a stage: the last that was said in it or below."""
    return next(said[-1] for each in lineage(file, name) if (said := each.said(word)))


def variables(file: str, name: str) -> dict[str, str]:
    said = [text for each in lineage(file, name) for text in each.said("ENV")]
    pairs = (pair.partition("=") for text in reversed(said) for pair in shlex.split(text))
    return {key: value for key, _, value in pairs}


IMAGES: Final = (
    ("Dockerfile", "router"),
    ("Dockerfile", "picker"),
    ("replica.Dockerfile", "replica"),
)


@pytest.mark.parametrize("file", FILES)
def test_bases_are_pinned_by_their_tags(file: str) -> None:
    known = stages(file)
    bases = {each.base for each in known.values()} - set(known)
    assert all(TAGGED.fullmatch(each) for each in bases)
    # What was built runs on the Python that it was built with.
    assert len(bases) == 1


@pytest.mark.parametrize("file", FILES)
def test_all_that_is_installed_is_known_by_its_hash(file: str) -> None:
    """Or comes from no registry; and each lock is there."""
    calls = [
        call
        for stage in stages(file).values()
        for text in stage.said("RUN")
        for call in text.split(" && ")
        if re.search(r"\bpip (install|wheel)\b", call)
    ]
    assert calls
    for call in calls:
        words = shlex.split(call)
        assert "--no-deps" in words
        assert "--require-hashes" in words or "--no-index" in words
        for lock in (each for each in words if each.endswith(".lock")):
            assert (ROOT / lock).is_file()
            assert (ROOT / lock).parent == LOCKS


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_is_there_and_let_in(file: str) -> None:
    known = stages(file)
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {each.removeprefix("!") for each in ignore if each.startswith("!")}
    for stage in known.values():
        for text in stage.said("COPY"):
            *sources, _ = [each for each in text.split() if not each.startswith("--")]
            if text.startswith("--from="):
                assert text.removeprefix("--from=").split()[0] in known
                continue
            for source in sources:
                assert (ROOT / source).exists()
                assert source.rstrip("/") in let_in
    assert "*" in ignore
    left_out = [each for each in ignore if each.startswith("**/")]
    assert any(fnmatch("router/__pycache__", each) for each in left_out)


def test_all_that_the_wheel_is_made_of_is_copied() -> None:
    build = stages("Dockerfile")["build"]
    copied = {each for text in build.said("COPY") for each in text.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {f"{each.removesuffix('*')}/" for each in packages}
    assert {*folders, "pyproject.toml", "README.md", "LICENSE"} <= copied


@pytest.mark.parametrize(("file", "image"), IMAGES)
def test_it_runs_as_a_user_without_rights_whom_the_manifests_name(file: str, image: str) -> None:
    user, _, group = last(file, image, "USER").partition(":")
    manifests = (ROOT / "configs" / "kubernetes" / "base").rglob("*.yaml")
    pods = [
        each["spec"]["template"]["spec"]
        for path in manifests
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if each.get("kind") in ("Deployment", "StatefulSet")
    ]
    named = [pod["securityContext"] for pod in pods if "securityContext" in pod]
    assert named
    for each in named:
        assert (str(each["runAsUser"]), str(each["runAsGroup"])) == (user, group)
    made = [text for each in lineage(file, image) for text in each.said("RUN")]
    assert any(f"useradd --uid {user} " in text for text in made)
    assert int(user) >= 1000


@pytest.mark.parametrize(("file", "image"), IMAGES)
def test_what_it_runs_is_a_command_with_its_options(file: str, image: str) -> None:
    assert json.loads(last(file, image, "ENTRYPOINT")) == ["warmroute"]
    name, *arguments = json.loads(last(file, image, "CMD"))
    assert name in known_commands()
    if arguments != ["--help"]:
        context = known_commands()[name].make_context(name, arguments)
        assert context.params["host"] == "0.0.0.0"
        assert str(context.params["config_path"]) == "/etc/warmroute/router.yaml"


@pytest.mark.parametrize(("file", "image"), IMAGES)
def test_its_health_is_asked_where_it_listens(file: str, image: str) -> None:
    url = variables(file, image)["HEALTH_URL"]
    check = last(file, image, "HEALTHCHECK")
    program, option, code = json.loads(check[check.index("[") :])
    assert (program, option) == ("python", "-c")
    compile(code, image, "exec")
    assert "os.environ['HEALTH_URL']" in code
    ports = last(file, image, "EXPOSE").split()
    listens = {
        "router": RouterConfig.port,
        "picker": PickerConfig.http_port,
        "replica": 8000,
    }[image]
    assert url == f"http://127.0.0.1:{listens}/health"
    assert str(listens) in ports
    assert "/opt/warmroute/bin:" in variables(file, image)["PATH"]
