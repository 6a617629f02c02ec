"""The working tree that results are made from: it must be clean, and has a commit."""

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.ttft import BenchError

RESULTS: Final = "bench/results"
"""What may differ from the commit: results are written while others are made."""
SOURCES: Final = ("warmroute_common", "router", "cacheengine", "simulator", "replay", "bench")
UNUSED: Final = (
    RESULTS,
    "bench/engine",
    "bench/overhead",
    "bench/soak",
    "bench/lmcache",
    "bench/screenshots.py",
    "bench/replica",
    "bench/proof/__main__.py",
    "bench/proof/cases.py",
    "bench/proof/bars.py",
    "bench/proof/compare.py",
    "bench/proof/plots.py",
    "bench/proof/show.py",
    "bench/proof/tables.py",
    "router/__main__.py",
    "router/app.py",
    "router/faults.py",
    "router/policy.py",
    "router/api",
    "router/cli",
    "router/doctor",
    "router/feeds",
    "router/gateway",
    "router/launch",
    "router/lmcache",
    "router/membership",
    "router/prompt",
    "router/proxy",
    "router/record",
    "router/ui",
)
"""Parts of the sources that no run uses: a change there leaves results as they are.

What `cases` says of a case is told by the case itself.
"""
_SHOWN: Final = 10


@dataclass(frozen=True)
class Tree:
    """A checkout."""

    root: Path

    def require_clean(self) -> None:
        """Raise `BenchError` where a file outside the results is not as it was committed."""
        told = self._git(
            "status", "--porcelain", "--untracked-files=all", "--", ".", f":(exclude){RESULTS}"
        )
        changed = told.splitlines()
        if not changed:
            return
        shown = "\n".join(f"  {line}" for line in changed[:_SHOWN])
        more = f"\n  and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise BenchError(
            f"{self.root} is not as it was committed, so a result made there could not be "
            f"made again:\n{shown}{more}\n"
            "Commit or remove these, or make the results in a clone of their own "
            "(git worktree add --detach PATH)."
        )

    def commit(self) -> str:
        """Return the commit's id, 12 digits."""
        return self._git("rev-parse", "--short=12", "HEAD").strip()

    def sources(self) -> str:
        """Return a digest of all committed sources that a run uses."""
        listed = self._git("ls-tree", "-r", "HEAD", "--", *SOURCES).splitlines()
        used = [line for line in listed if not is_unused(line.partition("\t")[2])]
        return hashlib.sha256("\n".join(used).encode()).hexdigest()

    def _git(self, *arguments: str) -> str:
        command: Sequence[str] = ("git", "-C", str(self.root), *arguments)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        except FileNotFoundError:
            raise BenchError("git is needed: results tell their commit") from None
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "stderr", None) or str(error)
            raise BenchError(f"git {arguments[0]} in {self.root}: {why.strip()}") from None
        return done.stdout


def is_unused(path: str) -> bool:
    """Whether no run uses a file, given by its path from the root."""
    return any(path == each or path.startswith(f"{each}/") for each in UNUSED)
