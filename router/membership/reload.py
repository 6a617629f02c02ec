"""Reading the configuration again while the router runs.

A file that cannot be used changes nothing, and the log says why. What cannot change while the
router runs is named in the log, and is used at its next start.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from router.config import RouterConfig
from warmroute_common.config_error import ConfigError, describe
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.membership")

_LOOK_EVERY_S: Final = 1.0
_FILES: Final = frozenset({"tls", "replica_tls"})
"""Settings that are files, whose contents may be others under the same names."""

Apply = Callable[[Any], None]
"""Uses another value of a setting; raises OSError where its files cannot be used."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """Where the configuration comes from."""

    path: Path
    read: Callable[[], RouterConfig]
    """Reads all of it, what the command line adds to it too; raises `ConfigError`."""


class Reload:
    """Keeps the settings as the file has them, between `start` and `stop`."""

    def __init__(
        self,
        config: RouterConfig,
        file: ConfigFile | None,
        live: Mapping[str, Apply],
        *,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        """``live`` has for each setting that can change while the router runs how that is used."""
        self.config = config
        """What the router runs with."""
        self.problem: str | None = None
        """Why the file as it is now is not used."""
        self.waiting: tuple[str, ...] = ()
        """Settings that are others in the file, and will be used at the next start."""
        self.counts: Counter[str] = Counter(applied=0, refused=0)
        """How often it was read again, by what came of it."""
        self._file = file
        self._live = live
        self._look_every_s = look_every_s
        self._seen: bytes | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look whether the files have changed."""
        if self._file is not None:
            self._seen = await self._digest()
            self._task = asyncio.create_task(self._watch(), name="configuration")

    async def stop(self) -> None:
        """End that."""
        if self._task is not None:
            await end_all([self._task])

    async def now(self) -> None:
        """Read the configuration again and use what can change; raises nothing."""
        if self._file is None:
            return
        # One after the other: the older reading of two must not be the one that counts.
        async with self._lock:
            self._seen = await self._digest()
            try:
                config = await asyncio.to_thread(self._file.read)
                self._apply(config)
            except (ConfigError, OSError) as error:
                self._refuse(describe(error))
            except Exception as error:  # whatever it is, the router goes on as it was
                log.exception("reading the configuration failed")
                self._refuse(describe(error))

    def _apply(self, config: RouterConfig) -> None:
        names = [each.name for each in fields(config)]
        changed = {name for name in names if getattr(config, name) != getattr(self.config, name)}
        used = changed & self._live.keys()
        if (config.tls is None) is not (self.config.tls is None):
            used.discard("tls")  # its ports speak HTTP or HTTPS from the start
        for name, apply in self._live.items():
            if name in used or name in _FILES:
                apply(getattr(config, name))
        self.waiting = tuple(sorted(changed - used))
        self.config = replace(self.config, **{name: getattr(config, name) for name in used})
        self.problem = None
        self.counts["applied"] += 1
        changes = ", ".join(sorted(used)) or "none"
        log.info(
            "the configuration was read again, certificates too; changed settings: %s", changes
        )
        if self.waiting:
            log.warning(
                "%s: changed in the configuration, and used at the router's next start only",
                ", ".join(self.waiting),
            )

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self.counts["refused"] += 1
        log.error("the configuration cannot be used, and nothing was changed: %s", problem)

    # --- whether it has changed

    async def _watch(self) -> None:
        last = self._seen
        while True:
            await asyncio.sleep(self._look_every_s)
            digest = await self._digest()
            # A file that is just being written is left until it stays as it is.
            if digest == last and digest != self._seen:
                await self.now()
            last = digest

    async def _digest(self) -> bytes:
        return await asyncio.to_thread(_digest, self._paths())

    def _paths(self) -> list[Path]:
        """Return the files that the configuration is in, by the names that it uses for them.

        Links are followed when they are read: Kubernetes exchanges them for others.
        """
        assert self._file is not None
        config = self.config
        named = [config.access.keys_file, config.replica_tls.ca_file]
        if config.tls is not None:
            named += [config.tls.cert_file, config.tls.key_file]
        return [self._file.path, *(Path(each) for each in named if each is not None)]


def _digest(paths: Iterable[Path]) -> bytes:
    """Return what tells files' contents from others; a file that cannot be read counts as such."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = hashlib.sha256(path.read_bytes()).digest()
        except OSError:
            content = b""
        digest.update(content + b"/")
    return digest.digest()
