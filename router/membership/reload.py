"""Reading the configuration again while the router runs.

A file that cannot be used changes nothing, and the log says why. One that cannot be opened because
the router has no file descriptors or memory is read again when it has. Settings declared with
``setting(live=True)`` are applied; for the others the log says that a restart is needed.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from router.config.settings import RouterConfig
from warmroute_common.config_reader import ConfigError, describe, live_settings
from warmroute_common.connection_errors import is_exhausted
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.membership")

_LOOK_EVERY_S: Final = 1.0
_LIVE: Final = live_settings(RouterConfig)

Apply = Callable[[Any], None]
"""Applies a setting's new value; raises OSError if its files cannot be used."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """Where the configuration comes from."""

    path: Path
    read: Callable[[], RouterConfig]
    """Reads the file, and adds the options of the command line; raises `ConfigError`."""


class Reload:
    """Applies the file's settings whenever the file changes, between `start` and `stop`."""

    def __init__(
        self,
        config: RouterConfig,
        file: ConfigFile | None,
        apply: Mapping[str, Apply],
        *,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        """``apply`` has a function for each live setting.

        A reload calls them in this order, for settings that have changed and for settings that name
        files, whose contents may have changed. Put those that can fail first.
        """
        if apply.keys() != _LIVE:
            raise ValueError(f"live settings are {sorted(_LIVE)}, not {sorted(apply)}")
        self.config = config
        """The settings in use."""
        self.problem: str | None = None
        """Why the current file is not used."""
        self.waiting: tuple[str, ...] = ()
        """Settings that have changed in the file and need a restart."""
        self.counts: Counter[str] = Counter(applied=0, refused=0)
        """Number of reloads by outcome."""
        self._file = file
        self._apply_by_name = apply
        self._look_every_s = look_every_s
        self._seen: bytes | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch the files for changes."""
        if self._file is not None:
            with suppress(OSError):
                self._seen = await self._digest()
            self._task = asyncio.create_task(self._watch(), name="configuration")

    async def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            await end_all([self._task])

    async def now(self) -> None:
        """Read the configuration again and apply it; raises nothing."""
        if self._file is None:
            return
        # One after the other: of two readings the older one must not be applied last.
        async with self._lock:
            try:
                self._seen = await self._digest()
                config = await asyncio.to_thread(self._file.read)
                self._apply(config)
            except (ConfigError, OSError) as error:
                if _is_own(error):
                    self._seen = None  # the next look reads it again
                    log.warning("configuration not reloaded yet: %s", describe(error))
                else:
                    self._refuse(describe(error))
            except Exception as error:  # the router keeps running with the old settings
                log.exception("reading the configuration failed")
                self._refuse(describe(error))

    def _apply(self, config: RouterConfig) -> None:
        names = [each.name for each in fields(config)]
        changed = {name for name in names if getattr(config, name) != getattr(self.config, name)}
        needs_restart = changed - _LIVE
        if (config.tls is None) is not (self.config.tls is None):
            needs_restart.add("tls")  # a port speaks HTTP or HTTPS from its start on
        for name, apply in self._apply_by_name.items():
            if name in changed or _files_of(getattr(config, name)):
                apply(getattr(config, name))
        applied = changed - needs_restart
        self.waiting = tuple(sorted(needs_restart))
        self.config = replace(self.config, **{name: getattr(config, name) for name in applied})
        self.problem = None
        self.counts["applied"] += 1
        if applied:
            log.info("configuration reloaded; applied: %s", ", ".join(sorted(applied)))
        elif not needs_restart:
            log.info("configuration reloaded; no setting has changed")
        if needs_restart:
            log.warning(
                "configuration reloaded; restart the router to apply: %s", ", ".join(self.waiting)
            )

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self.counts["refused"] += 1
        log.error("configuration not reloaded, the old settings stay in use: %s", problem)

    # --- whether it has changed

    async def _watch(self) -> None:
        last = self._seen
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                digest = await self._digest()
            except OSError:
                continue
            # A file that is still being written is read once it no longer changes.
            if digest == last and digest != self._seen:
                await self.now()
            last = digest

    async def _digest(self) -> bytes:
        """Return a hash of all files; raise OSError if the router has no resources to open them."""
        return await asyncio.to_thread(_digest, self._paths())

    def _paths(self) -> list[Path]:
        """Return the files of the configuration, under the names that it uses.

        Links are followed at each reading: Kubernetes replaces them.
        """
        assert self._file is not None
        sections = (getattr(self.config, name) for name in sorted(_LIVE))
        return [self._file.path, *(path for each in sections for path in _files_of(each))]


def _is_own(error: BaseException | None) -> bool:
    """Whether an error was raised because this process had no resources."""
    while error is not None and not is_exhausted(error):
        error = error.__context__
    return error is not None


def _files_of(section: object) -> list[Path]:
    """Return the files that a section of the configuration names."""
    if not is_dataclass(section):
        return []
    named = [getattr(section, each.name) for each in fields(section) if each.name[-5:] == "_file"]
    return [Path(each) for each in named if each is not None]


def _digest(paths: Iterable[Path]) -> bytes:
    """Return a hash of the files' contents; an unreadable file counts as empty.

    Raises OSError if this process has no resources to open them.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = hashlib.sha256(path.read_bytes()).digest()
        except OSError as error:
            if is_exhausted(error):
                raise
            content = b""
        digest.update(content + b"/")
    return digest.digest()
