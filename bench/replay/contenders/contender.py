"""What a contender is, and how one is started in front of a fleet."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.replay.fleet import Fleet
from bench.ttft import BenchError
from router.launch.processes import ChildFailedError, ProcessGroup, tail

_READY_S: Final = 60.0
_POLL_S: Final = 0.1


class CannotRunError(Exception):
    """Why a contender is not in the comparison."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a contender's process is started, and when it knows the whole fleet."""

    command: list[str]
    url: str
    is_ready: Callable[[], bool]
    """Asked until it says so; may raise what `fetch` raises."""
    environment: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A router by name."""

    name: str
    launch: Callable[[Fleet, Path], Launch] | None
    """Given the fleet and a directory of its own; None: no process, the client asks the oracle.

    Raises `CannotRunError`.
    """
    sends_token_ids: bool = False
    """Whether its prompts are token ids: else they are text."""
    session_header: str = "x-session-id"
    """In which it wants its clients to name their session."""
    finish_path: str | None = None
    """Where its clients tell the end of a session; None: it need not know."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A contender that is ready."""

    url: str | None
    """None: the oracle."""
    pid: int | None


def start(contender: Contender, group: ProcessGroup, fleet: Fleet, directory: Path) -> Running:
    """Start a contender; return when it knows every replica. Raises `CannotRunError`."""
    if contender.launch is None:
        return Running(url=None, pid=None)
    launch = contender.launch(fleet, directory)
    log = directory / f"{contender.name}.log"
    try:
        pid = group.start(contender.name, launch.command, launch.environment, log)
        deadline_s = time.monotonic() + _READY_S
        while not _is_ready(launch):
            group.check()
            if time.monotonic() > deadline_s:
                raise CannotRunError(f"not ready within {_READY_S:.0f} s: {tail(log, lines=3)}")
            time.sleep(_POLL_S)
    except ChildFailedError as error:
        if error.name != contender.name:
            raise BenchError(str(error)) from None
        raise CannotRunError(f"{error.what}: {tail(log, lines=3)}") from None
    return Running(url=launch.url, pid=pid)


def _is_ready(launch: Launch) -> bool:
    try:
        return launch.is_ready()
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return False


def fetch(url: str, body: object | None = None) -> Any:
    """Return a URL's JSON (None where it has none); raises OSError, also for an error status."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # Never through a proxy from the environment: these are our own children.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=5.0) as answer:
        content = answer.read()
    try:
        return json.loads(content)
    except ValueError:
        return None
