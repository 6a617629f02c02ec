"""``warmroute up``: runs replicas and the router on one machine."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from router.launch.fleet_file import FleetPlan
from router.launch.processes import ProcessGroup
from warmroute_common.addresses import without_passwords
from warmroute_common.config_reader import ConfigLocation, printable


def commands_text(fleet: FleetPlan) -> str:
    """Return the fleet's commands as a person would type them, with ``***`` for secrets."""
    lines = []
    for process in fleet.processes:
        env = [f"{name}={shlex.quote(value)}" for name, value in printable(process.env).items()]
        lines.append(" ".join([*env, shlex.join(printable(process.argv))]))
    for path, settings in _files(fleet):
        lines += [f"# {path}:", json.dumps(printable(settings), indent=2)]
    return without_passwords("\n".join(lines))


def run(fleet: FleetPlan, *, say: Callable[[str], None]) -> None:
    """Start all processes, report when they are ready, and wait; stop all at the end.

    Returns on Ctrl-C or SIGTERM. Raises `ChildFailedError` if a process dies or is not ready in
    time.
    """
    _write_files(fleet)
    try:
        with ProcessGroup() as group:
            for process in fleet.processes:
                env = {**os.environ, **process.env}
                group.start(process.name, process.argv, env, process.log_path)
                say(f"{process.name}: started, log in {process.log_path}")
            for process in fleet.processes:
                url = f"{process.url}/health"
                took_s = group.wait_ready(process.name, url, fleet.ready_timeout_s, say)
                say(f"{process.name}: ready at {process.url} after {took_s:.0f} s")
            say(f"All processes are ready: OPENAI_BASE_URL={fleet.url}/v1 (Ctrl-C stops them)")
            group.wait()
    except KeyboardInterrupt:
        say("Stopped all processes.")


def _files(fleet: FleetPlan) -> Iterator[tuple[Path, dict[str, Any]]]:
    yield fleet.log_dir / "router.yaml", fleet.router_settings
    if fleet.gateway_settings is not None:
        yield fleet.log_dir / "envoy.yaml", fleet.gateway_settings


def _write_files(fleet: FleetPlan) -> None:
    try:
        fleet.log_dir.mkdir(parents=True, exist_ok=True)
        for path, settings in _files(fleet):
            # JSON is YAML. The file may have an api_key, so only its owner may read it. An old file
            # is deleted first: others may be able to read it.
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise ConfigLocation(str(fleet.log_dir)).error(problem, "set log_dir") from None
