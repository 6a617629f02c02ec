"""NIXL in a directory of its own, for the PYTHONPATH of vLLM servers: only their tests need it.

``WARMROUTE_NIXL_PATH`` names a directory that has it already.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.environments import NotInstalledError

DIRECTORY: Final = Path.home() / ".cache" / "warmroute-nixl"

_LOCK: Final = Path(__file__).resolve().parents[2] / "requirements" / "nixl.lock"
_INSTALL_S: Final = 600.0


def path() -> Path | None:
    """Return the directory that has NIXL; None if it is not installed."""
    found = Path(os.environ.get("WARMROUTE_NIXL_PATH") or DIRECTORY)
    return found if (found / "nixl").is_dir() else None


def server_environment(directory: Path, side_port: int) -> dict[str, str]:
    """Return what a vLLM server needs of its environment to run NixlConnector on this machine."""
    found = filter(None, (str(directory), os.environ.get("PYTHONPATH")))
    return {
        "PYTHONPATH": os.pathsep.join(found),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
    }


def install() -> Path:
    """Return the directory that has NIXL (240 MB), made if there is none; raise
    `NotInstalledError`."""
    if (found := path()) is not None:
        return found
    print(f"installing NIXL in {DIRECTORY}", file=sys.stderr)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    locked = ("--no-deps", "--require-hashes", "--target", str(DIRECTORY), "-r", str(_LOCK))
    try:
        subprocess.run(
            [*pip, *locked], check=True, timeout=_INSTALL_S, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout).strip().rpartition("\n")[2]
        raise NotInstalledError(f"NIXL is not installed: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"NIXL is not installed: {error}") from None
    return DIRECTORY


if __name__ == "__main__":
    print(install())
