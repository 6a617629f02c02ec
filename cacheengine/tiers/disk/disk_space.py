"""What the disk tier's files take, so that they never take more than they may.

The engine counts the chunks it knows. What it cannot know is counted here:
files that could not be removed, and chunks of models that are not served.

A chunk that leaves makes room for one that comes: its file is kept as a spare
and written anew. A new file would need an inode and blocks, and a file system
that has just removed many finds those slowly (ext4 passes over inodes it freed
in the last seconds, one by one).

Files are named by text, not by `Path`, which puts each part of a name into the interpreter's own
table of strings: names that come and go have that table, megabytes in one piece, made anew after
some ten thousand of them, on whichever thread is next.
"""

import itertools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cacheengine.tiers.disk.directories import OtherLayouts

logger = logging.getLogger("vllm.warmroute")

_TEMPORARY_SUFFIX: Final = ".tmp"
_MOST_SPARES: Final = 16
_RETRIES_A_PUT: Final = 2
_MOST_REMEMBERED: Final = 100_000


@dataclass(frozen=True)
class Draft:
    """A file to write a chunk into, under a name that no chunk has."""

    path: str
    is_spare: bool
    """It exists, and is as long as a chunk's file."""


class DiskSpace:
    """Counts the files of all paths of one tier, and removes them. Thread-safe.

    ``used_bytes`` is never less than what our files take: what others remove
    behind our back stays counted until a read, a put or a removal of it finds
    that out. So it refuses puts only while there are files that cannot be
    removed, and else leaves the limit to the engine.
    """

    def __init__(self, capacity_bytes: int, item_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._item_bytes = item_bytes
        # Held over removals, too: else two puts might count on the same room.
        self._lock = threading.Lock()
        self._used_bytes = 0
        # The chunks counted whose files have their names, by directory: the keys are the
        # engine's own objects.
        self._held: defaultdict[str, set[bytes]] = defaultdict(set)
        self._others = OtherLayouts([])
        self._spares: defaultdict[str, list[str]] = defaultdict(list)
        self._spare_numbers = itertools.count()
        # Files that should be gone, with their sizes, in the order of the attempts.
        self._stuck: dict[str, int] = {}
        # Those of them that are written anew: not to be removed under their writer.
        self._being_written: set[str] = set()
        self._has_lost_some = False

    @property
    def used_bytes(self) -> int:
        """What our own files take, those included that are spare or could not be removed."""
        with self._lock:
            return self._used_bytes

    def start_with(self, held: Iterable[tuple[str, bytes]], others: OtherLayouts) -> None:
        """Take over what is on disk; other layouts may keep what this one leaves."""
        with self._lock:
            for path, key in held:
                self._held[_directory_of(path)].add(key)
                self._used_bytes += self._item_bytes
            self._others = others
            self._shrink_others()

    def take(self, path: str) -> Draft | None:
        """Count a chunk's file before it is written; None: there is no room.

        `stored` or `failed` must follow.
        """
        with self._lock:
            self._retry()
            spares = self._spares[_directory_of(path)]
            if spares:
                draft = Draft(spares.pop(), is_spare=True)
            elif self._may_grow():
                draft = Draft(path + _TEMPORARY_SUFFIX, is_spare=False)
            else:
                return None
            if path in self._stuck:
                self._being_written.add(path)
            return draft

    def _may_grow(self) -> bool:
        """Count one more file, and make room for it if that can be done."""
        self._used_bytes += self._item_bytes
        for spare in [each for spares in self._spares.values() for each in spares]:
            if self._used_bytes <= self._capacity_bytes:
                break
            self._spares[_directory_of(spare)].remove(spare)
            self._remove(spare, self._item_bytes)
        self._shrink_others()
        if self._used_bytes + self._others.used_bytes <= self._capacity_bytes:
            return True
        if not self._stuck and not self._has_lost_some and not self._others.used_bytes:
            return True
        self._used_bytes -= self._item_bytes
        return False

    def stored(self, path: str, key: bytes) -> None:
        """Note that a chunk's file was written and has its name."""
        with self._lock:
            self._being_written.discard(path)
            # What stood there before is replaced.
            self._used_bytes -= self._stuck.pop(path, 0)
            self._forget(path, key)
            self._held[_directory_of(path)].add(key)

    def vanished(self, path: str, key: bytes) -> None:
        """Note that a chunk's file is not there, which may have been counted."""
        with self._lock:
            self._forget(path, key)

    def _forget(self, path: str, key: bytes) -> None:
        """Take a file that is gone off the count, if it is on it."""
        held = self._held[_directory_of(path)]
        if key in held:
            held.remove(key)
            self._used_bytes -= self._item_bytes

    def failed(self, path: str, draft: Draft, *, exists: bool) -> None:
        """Note that a file was not written after all; remove what there is of it."""
        with self._lock:
            self._being_written.discard(path)
            if not exists or not self._remove(draft.path, self._item_bytes):
                self._used_bytes -= self._item_bytes

    def recycle(self, path: str, key: bytes) -> None:
        """Remove a chunk that is whole; its file may live on as a spare."""
        with self._lock:
            spares = self._spares[_directory_of(path)]
            if len(spares) < _MOST_SPARES:
                number = next(self._spare_numbers)
                spare = f"{path}.{number}{_TEMPORARY_SUFFIX}"
                try:
                    os.rename(path, spare)
                except FileNotFoundError:
                    self._forget(path, key)
                    return
                except OSError:
                    pass  # so it cannot be removed either, most likely
                else:
                    spares.append(spare)
                    self._held[_directory_of(path)].discard(key)
                    return
            self._remove_chunk(path, key)

    def remove(self, path: str, key: bytes) -> None:
        """Remove a chunk's file; one that resists stays counted and is tried again later."""
        with self._lock:
            self._remove_chunk(path, key)

    def _remove_chunk(self, path: str, key: bytes) -> None:
        if self._remove(path, self._item_bytes):
            self._held[_directory_of(path)].discard(key)
        else:
            self._forget(path, key)

    def remove_leftover(self, path: str, size_bytes: int) -> None:
        """Do the same with a file that was not counted, whatever its size."""
        with self._lock:
            self._used_bytes += size_bytes
            self._remove(path, size_bytes)

    def remove_spares(self) -> None:
        """Remove the spare files."""
        with self._lock:
            for spares in self._spares.values():
                while spares:
                    self._remove(spares.pop(), self._item_bytes)

    def _remove(self, path: str, size_bytes: int) -> bool:
        """Return False when there was nothing, and nothing was taken off the count."""
        try:
            if not _unlink(path):
                return False
        except OSError as error:
            if not self._stuck:
                logger.warning("disk tier: cannot remove %s, will try again: %s", path, error)
            if len(self._stuck) < _MOST_REMEMBERED:
                self._stuck[path] = size_bytes
            else:
                self._has_lost_some = True
        else:
            self._used_bytes -= size_bytes
        return True

    def _retry(self) -> None:
        resting = (path for path in self._stuck if path not in self._being_written)
        for path in list(itertools.islice(resting, _RETRIES_A_PUT)):
            # Put at the end again if it still resists: others get their turn.
            self._remove(path, self._stuck.pop(path))

    def _shrink_others(self) -> None:
        budget_bytes = max(0, self._capacity_bytes - self._used_bytes)
        if self._others.used_bytes > budget_bytes:
            self._others.shrink_to(budget_bytes)


def _directory_of(file: str) -> str:
    return file.rsplit("/", 2)[0]


def _unlink(path: str) -> bool:
    """Return whether there was something to remove; OSError when it is still there."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # A file system that cannot be changed says so of any name.
        if _is_known_to_be_absent(path):
            return False
        raise
    return True


def _is_known_to_be_absent(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
