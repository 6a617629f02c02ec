"""Install the servers and clients that tests run: `make servers`, or `python -m tools.servers`.

Uses apt-get, as root or with sudo if that needs no password; does nothing if all are installed.
Prints each package that cannot be installed and the tests that are then skipped. With ``CI`` in the
environment no test may be skipped, so that is an error.

Standard library only, so that it runs without a virtual environment.
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """A program or library that tests need, and its package."""

    package: str
    is_there: Callable[[], bool]
    without: str
    """Its tests, which are skipped without it."""


def _has_redis() -> bool:
    # Debian's redis-tools has the server, too: as redis-check-rdb, which looks at its own name.
    return bool(shutil.which("redis-server") or shutil.which("redis-check-rdb"))


def _has_library(name: str) -> Callable[[], bool]:
    return lambda: ctypes.util.find_library(name) is not None


_MOONCAKE = "the remote tier on Mooncake Store"
_NODE = "OpenAI's client for Node"
# Not redis-server, whose package starts a server with the machine.
NEEDS = (
    Need("redis-tools", _has_redis, "the remote tier on Redis"),
    Need("openssl", lambda: shutil.which("openssl") is not None, "TLS"),
    Need("curl", lambda: shutil.which("curl") is not None, "curl as a client"),
    Need("nodejs", lambda: shutil.which("node") is not None, _NODE),
    Need("npm", lambda: shutil.which("npm") is not None, _NODE),
    Need("chromium", lambda: shutil.which("chromium") is not None, "the page at /ui"),
    Need("libibverbs1", _has_library("ibverbs"), _MOONCAKE),
    Need("librdmacm1", _has_library("rdmacm"), _MOONCAKE),
    Need("libnuma1", _has_library("numa"), _MOONCAKE),
)


def main() -> int:
    """Install what is missing and return the exit code."""
    if missing := _missing():
        _install([need.package for need in missing])
        missing = _missing()
    for need in missing:
        print(f"servers: {need.package} is not installed: not tested here: {need.without}")
    if missing and os.environ.get("CI"):
        print("servers: CI is set, so no test may be skipped: install them, or unset it")
        return 1
    return 0


def _missing() -> list[Need]:
    return [need for need in NEEDS if not need.is_there()]


def _install(packages: Sequence[str]) -> None:
    root = _as_root()
    if root is None:
        print("servers: cannot install packages here (no apt-get, or neither root nor sudo)")
        return
    print(f"servers: installing {' '.join(packages)}", flush=True)
    # Waits for another apt-get that runs.
    apt = [*root, "apt-get", "-o", "DPkg::Lock::Timeout=60"]
    install = [*apt, "install", "-y", "-qq", "--no-install-recommends"]
    if _run([*install, *packages]):
        return
    # After an interrupted installation apt-get refuses every other until this has run.
    _run([*root, "dpkg", "--configure", "-a"], show=True)
    # The package lists may be old, or missing as in a fresh container.
    _run([*apt, "update", "-qq"])
    for package in packages:
        # One by one: a package that this distribution lacks must not block the others.
        _run([*install, package], show=True)


def _as_root() -> list[str] | None:
    """Return what to put before a command so that root runs it; None: not permitted."""
    if shutil.which("apt-get") is None:
        return None
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    if os.geteuid() == 0:
        return environment
    if shutil.which("sudo") and _run(["sudo", "-n", "true"]):
        return ["sudo", "-n", *environment]
    return None


def _run(command: Sequence[str], *, show: bool = False) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"servers: {command[0]}: {error}")
        return False
    if show and done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"servers: {' '.join(command)}: {reason}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
