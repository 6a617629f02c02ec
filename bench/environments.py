"""Python environments of their own, for programs that do not share ours: made on demand, once."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_INSTALL_S: Final = 600.0


class NotInstalledError(Exception):
    """Why there is no such environment."""


def installed(
    directory: Path,
    packages: Sequence[str],
    *steps: Sequence[str],
    if_found: Sequence[str] = (),
) -> Path:
    """Return the interpreter of an environment that has ``packages``, made where there is none.

    Each step is what one ``pip install`` is told; by default the packages
    alone, with what they need. ``if_found`` is a step before them that may fail.
    Raises `NotInstalledError`.
    """
    python = directory / "bin" / "python"
    done = directory / mark(packages)
    if done.exists():
        return python
    print(f"installing {' and '.join(packages)} in {directory}", file=sys.stderr)
    _run(sys.executable, "-m", "venv", str(directory))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if if_found:
        with suppress(NotInstalledError):
            _run(*pip, *if_found)
    for step in steps or (packages,):
        _run(*pip, *step)
    done.touch()
    return python


def mark(packages: Sequence[str]) -> str:
    """Return the name of the file that says that an environment with ``packages`` is whole."""
    return f".{'-'.join(packages).replace('=', '')}"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, timeout=_INSTALL_S, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout).strip().rpartition("\n")[2]
        raise NotInstalledError(f"not installed: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"not installed: {error}") from None
