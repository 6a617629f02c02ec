"""One child process, the leader of a process group of its own."""

import http.client
import os
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path


class Child:
    """A process that was started, and where its output goes."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        log_path: Path,
        cwd: Path | None,
    ) -> None:
        """Start it, its output in a new ``log_path``; raise OSError."""
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_s = time.monotonic()

    def returncode(self) -> int | None:
        """Return how it ended, as subprocess has it, without reaping it; None if it has not."""
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def alive_in(groups: Collection[int]) -> bool:
    """Whether a process of these groups lives; zombies do not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in groups and state != "Z":
            return True
    return False


def answers(url: str) -> bool:
    """Whether a child answers 200 there."""
    try:
        # Never through a proxy from the environment: these are our own children. Nor is their
        # certificate verified, which may well name another host than this one.
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
        )
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (http.client.HTTPException, OSError, ValueError):
        return False


def meaning(returncode: int) -> str:
    """Return a returncode in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name
