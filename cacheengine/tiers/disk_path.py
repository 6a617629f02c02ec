"""One path of the disk tier: slots in few large files.

Slots are numbered. A portion of adjacent slots lies in one file, the next portion in the next of
`_FILES` files, and so on in turns: all files of a large tier stay open, and while one of them
grows, the others are read and written (a file system ends direct I/O on a file that grows).

A slot holds a chunk, is being written, is free (it has blocks of the disk and counts against the
limit), or is a hole (it has none). A chunk that is removed leaves its slot free for the next one:
no file is made, renamed or removed. Too many free slots become holes.
"""

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from cacheengine.tiers.layout_directory import LayoutDirectory
from cacheengine.tiers.other_layouts import DiskBudget, OtherLayouts, allocated_bytes
from cacheengine.tiers.slot_file import (
    PAGE_BYTES,
    SEAL_BYTES,
    ChunkSeal,
    SlotFile,
    why_not_direct,
)
from cacheengine.tiers.tier import Chunk, GetOutcome, PutOutcome

logger = logging.getLogger("vllm.warmroute")

_FILES: Final = 64
_PORTION_BYTES: Final = 64 * 1024 * 1024
_LEAST_FREE: Final = 16
"""At most this many free slots, or a portion if that is more, keep their blocks."""
_SCAN_THREADS: Final = 16
_SEALS_A_JOB: Final = 1000
_NO_SPACE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Run(NamedTuple):
    """Adjacent slots of one file, from ``offset`` on."""

    file: SlotFile
    offset: int
    slots: Sequence[int]


class DiskPath:
    """The chunks in ``<root>/<fingerprint>``, which is locked until `close`.

    Thread-safe, with at most one operation on a key, several gets excepted. ``used_bytes`` is never
    less than the files take. ``others`` make room when files grow. The constructor raises OSError.
    """

    def __init__(
        self,
        directory: Path,
        seal: ChunkSeal,
        budget: DiskBudget,
        *,
        direct: bool,
        lock_wait_s: float,
    ) -> None:
        self.directory = directory
        self.used_bytes = 0
        self.others = OtherLayouts(budget)
        self._owned = LayoutDirectory(directory, lock_wait_s)
        self._seal = seal
        self._slot_bytes = seal.slot_bytes
        # What is after a chunk in its last page, if anything.
        size_bytes = -seal.payload_bytes % PAGE_BYTES
        self._filler = [memoryview(bytearray(size_bytes))] if size_bytes else []
        self._budget = budget
        problem = "the chunk size is not a multiple of 4096 bytes" if self._filler else None
        if direct and (problem := problem or why_not_direct(directory)):
            logger.info("disk tier: %s is used by the page cache: %s", directory, problem)
        self._flags = os.O_DIRECT if direct and not problem else 0
        self._portion = max(1, _PORTION_BYTES // seal.slot_bytes)
        self._most_free = max(self._portion, _LEAST_FREE)
        self._of_thread = threading.local()
        self._failing: set[str] = set()
        # Guards all below, also while files grow and shrink: two puts must not take one slot. It
        # is this path's alone, and reads do not take it.
        self._lock = threading.Lock()
        self._files: dict[int, SlotFile] = {}
        # The keys are the engine's own objects.
        self._held: dict[bytes, int] = {}
        self._free: list[int] = []
        self._holes: list[int] = []
        # No slot from this number on was ever used.
        self._end = 0

    def _place(self, slot: int) -> tuple[int, int]:
        """Return the number of a slot's file, and the offset there."""
        portion, place = divmod(slot, self._portion)
        turn, number = divmod(portion, _FILES)
        return number, (turn * self._portion + place) * self._slot_bytes

    def _adjacent(self, slots: Iterable[int]) -> Iterator[list[int]]:
        """Sort slots, and cut them into runs that lie next to each other in a file."""
        run: list[int] = []
        for slot in sorted(slots):
            if run and (slot != run[-1] + 1 or slot % self._portion == 0):
                yield run
                run = []
            run.append(slot)
        if run:
            yield run

    # --- reads ---

    def __contains__(self, key: bytes) -> bool:
        """Whether a chunk is held. Does not wait for other calls."""
        return key in self._held

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read chunks, those in adjacent slots by one call. The slots of damaged ones are freed."""
        outcomes = [GetOutcome.MISSING] * len(chunks)
        for run, places in self._runs_of([key for key, _ in chunks]):
            ended = self._read(run, [chunks[at] for at in places])
            for at, outcome in zip(places, ended, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _read(self, run: Run, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        pages = self._pages(len(chunks))
        failure: OSError | None = None
        try:
            is_whole = run.file.read(self._memory(chunks, pages), run.offset)
        except OSError as error:
            failure, is_whole = error, False
        if not is_whole and len(chunks) > 1:
            # Each alone: what is broken costs its own chunk.
            ended = []
            for at, (slot, chunk) in enumerate(zip(run.slots, chunks, strict=True)):
                alone = Run(run.file, run.offset + at * self._slot_bytes, [slot])
                ended += self._read(alone, [chunk])
            return ended
        self._report("read", failure)
        if failure is not None:
            return [GetOutcome.FAILED]
        outcomes = [GetOutcome.OK] * len(chunks)
        for at, (key, into) in enumerate(chunks):
            if not is_whole or pages[at].tobytes() != self._seal.of(key, into):
                outcomes[at] = GetOutcome.DAMAGED
                logger.warning("disk tier: removed a damaged chunk in %s", self.directory)
                self.remove([key], is_damaged=True)
        return outcomes

    def _runs_of(self, keys: Sequence[bytes]) -> list[tuple[Run, list[int]]]:
        """Return where chunks are, and which of ``keys`` each run has; none for those not held."""
        # Without the lock: nobody removes a chunk while it is read.
        found = ((self._held.get(key), at) for at, key in enumerate(keys))
        slots = {slot: at for slot, at in found if slot is not None}
        if self._gone(slots):
            with self._lock:
                self._drop(self._gone(slots))
        return [(run, [slots[slot] for slot in run.slots]) for run in self._runs(slots)]

    def _runs(self, slots: Iterable[int]) -> list[Run]:
        places = ((adjacent, *self._place(adjacent[0])) for adjacent in self._adjacent(slots))
        files = {**self._files}
        return [Run(files[number], at, run) for run, number, at in places if number in files]

    def _gone(self, slots: Iterable[int]) -> set[int]:
        """Return the numbers of files of slots that somebody removed: chunks must not go there."""
        numbers = {self._place(slot)[0] for slot in slots}
        files = ((number, self._files.get(number)) for number in numbers)
        return {number for number, file in files if file is None or file.is_removed}

    # --- writes ---

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Write chunks into free slots, those in adjacent ones by one call."""
        try:
            runs = self._take([key for key, _ in chunks])
        except OSError as error:
            return [self._write_failed(error)] * len(chunks)
        outcomes: list[PutOutcome] = []
        written: dict[int, bytes] = {}
        try:
            for run in runs:
                part = chunks[len(outcomes) : len(outcomes) + len(run.slots)]
                outcome = self._write(run, part)
                outcomes += [outcome] * len(part)
                if outcome is PutOutcome.STORED:
                    written.update(zip(run.slots, (key for key, _ in part), strict=True))
        finally:
            self._end_writes(runs, written)
        return outcomes + [PutOutcome.NO_SPACE] * (len(chunks) - len(outcomes))

    def _write(self, run: Run, chunks: Sequence[Chunk]) -> PutOutcome:
        pages = self._pages(len(chunks))
        for (key, payload), page in zip(chunks, pages, strict=True):
            page[:] = self._seal.of(key, payload)
        try:
            run.file.write(self._memory(chunks, pages), run.offset)
        except OSError as error:
            return self._write_failed(error)
        self._report("write", None)
        return PutOutcome.STORED

    def _write_failed(self, error: OSError) -> PutOutcome:
        self._report("write", error)
        return PutOutcome.NO_SPACE if error.errno in _NO_SPACE_ERRORS else PutOutcome.FAILED

    def _take(self, keys: Sequence[bytes]) -> list[Run]:
        """Return slots to write chunks to, fewer if there is no space. `_end_writes` must follow.

        Raises OSError if there is none because a file cannot be made or cannot grow.
        """
        with self._lock:
            self._find_free(keys)
            while gone := self._gone(self._free[-len(keys) :]):
                self._drop(gone)
                self._find_free(keys)
            slots = self._free[-len(keys) :]
            del self._free[-len(keys) :]
            return self._runs(slots)

    def _find_free(self, keys: Sequence[bytes]) -> None:
        try:
            while len(self._free) < len(keys) and self._grow(len(keys) - len(self._free)):
                pass
        except OSError:
            if not self._free:
                raise
        if len(self._free) < len(keys):
            # A chunk that cannot be read is put again: in a full tier into its own slot.
            self._free += [self._held.pop(key) for key in keys if key in self._held]

    def _grow(self, wanted: int) -> bool:
        """Get blocks for holes, at most a portion; other layouts make room for ``wanted`` only."""
        if not self._holes:
            self._holes = [*range(self._end + self._portion - 1, self._end - 1, -1)]
            self._end += self._portion
        self._holes.sort(reverse=True)
        number, offset = self._place(self._holes[-1])
        if number in self._files and self._files[number].is_removed:
            self._drop({number})
            return True  # there are more holes now
        # Free slots are of no use to the other paths: few of a small tier's.
        most = max(wanted, self._budget.capacity_bytes // _FILES // self._slot_bytes)
        slots = next(self._adjacent(self._holes[: -most - 1 : -1]))
        least = min(wanted, len(slots))
        count = self._budget.take(len(slots), self._slot_bytes)
        if count < least:
            self.others.make_room((least - count) * self._slot_bytes)
            count += self._budget.take(least - count, self._slot_bytes)
        allocated = 0
        try:
            allocated = self._allocate(number, offset, count) if count else 0
        finally:
            self._budget.count((allocated - count) * self._slot_bytes)
        self.used_bytes += allocated * self._slot_bytes
        del self._holes[len(self._holes) - allocated :]
        # The last one is taken first.
        self._free[:0] = slots[:allocated][::-1]
        return allocated > 0

    def _allocate(self, number: int, offset: int, count: int) -> int:
        """Get blocks for adjacent slots, or for the first alone; return for how many."""
        if number not in self._files:
            self._owned.restore()
            name = self._owned.file(number)
            self._files[number] = SlotFile.open(name, self._flags | os.O_CREAT)
        file, size_bytes = self._files[number], count * self._slot_bytes
        try:
            file.reserve(offset, size_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                # What it got before the disk was full.
                file.give_back(offset, size_bytes)
            if count == 1:
                raise
            return self._allocate(number, offset, 1)
        return count

    def _end_writes(self, runs: Iterable[Run], written: Mapping[int, bytes]) -> None:
        """End writes; ``written`` has slots and keys of the writes that succeeded."""
        with self._lock:
            for run in runs:
                if self._files.get(self._place(run.slots[0])[0]) is not run.file:
                    self._become_holes(run.slots)  # its file was removed meanwhile
                    continue
                for slot in run.slots:
                    key = written.get(slot)
                    # Not written: taken last, since it may have failed because of its place.
                    former = slot if key is None else self._held.pop(key, None)
                    if former is not None:
                        self._free.insert(0, former)
                    if key is not None:
                        self._held[key] = slot

    def _memory(self, chunks: Sequence[Chunk], pages: Sequence[memoryview]) -> list[memoryview]:
        """Return the memory of adjacent slots.

        Raises ValueError for chunks of another size, which would reach into other slots.
        """
        if {memory.nbytes for _, memory in chunks} != {self._seal.payload_bytes}:
            raise ValueError(f"not all chunks have {self._seal.payload_bytes} bytes")
        slots = (
            (memory, *self._filler, page) for (_, memory), page in zip(chunks, pages, strict=True)
        )
        return [*chain.from_iterable(slots)]

    def _pages(self, count: int) -> list[memoryview]:
        """Return pages of this thread's memory for seals. Direct I/O needs them aligned."""
        pages: list[memoryview] = getattr(self._of_thread, "pages", [])
        if len(pages) < count:
            memory = memoryview(mmap.mmap(-1, count * SEAL_BYTES))
            starts = range(0, len(memory), SEAL_BYTES)
            pages = self._of_thread.pages = [memory[at : at + SEAL_BYTES] for at in starts]
        return pages[:count]

    # --- removals ---

    def remove(self, keys: Iterable[bytes], *, is_damaged: bool = False) -> None:
        """Free the slots of chunks. Keys that are not held are ignored."""
        with self._lock:
            slots = [self._held.pop(key) for key in keys if key in self._held]
            most_free = 0 if is_damaged or self._budget.lacks(0) else self._most_free
            kept = slots[: max(0, most_free - len(self._free))]
            self._free += kept[::-1]
            self._give_back(slots[len(kept) :])

    def _give_back(self, slots: Iterable[int]) -> None:
        """Make holes of slots. Those of a file system that cannot do that stay free."""
        for adjacent in self._adjacent(slots):
            number, offset = self._place(adjacent[0])
            try:
                if file := self._files.get(number):
                    file.give_back(offset, len(adjacent) * self._slot_bytes)
            except OSError:
                self._free += adjacent
            else:
                self._become_holes(adjacent)

    def _become_holes(self, slots: Sequence[int]) -> None:
        self._holes += slots
        self._count(-len(slots) * self._slot_bytes)

    def _count(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self._budget.count(size_bytes)

    def _drop(self, numbers: set[int]) -> None:
        """Forget files that somebody removed, with their chunks."""
        lost = [key for key, slot in self._held.items() if self._place(slot)[0] in numbers]
        gone = {slot for slot in self._free if self._place(slot)[0] in numbers}
        self._files = {each: file for each, file in self._files.items() if each not in numbers}
        self._free = [slot for slot in self._free if slot not in gone]
        self._become_holes([*gone, *(self._held.pop(key) for key in lost)])
        if numbers:  # or another thread was faster
            logger.warning("disk tier: %s has lost files with %d chunks", self.directory, len(lost))

    # --- start and end ---

    def scan(self, now_ns: int) -> dict[bytes, int]:
        """Find the chunks that an earlier process left: by its index, or by their seals.

        Returns their places in the order in which they leave. Chunks that the index does not name
        were written after the others. A file that cannot be read stays, with a warning.
        """
        indexed, is_exact = self._owned.take_index()
        there = {*self._open_files()}
        found = {key: slot for key, (_, slot) in indexed.items() if slot in there}
        if not is_exact:
            found = self._sealed(there, found)
        with self._lock:
            self._held = found
            self._end = (max(there, default=-1) // self._portion + 1) * self._portion
            # What was left by an orderly end and holds no chunk has no blocks.
            counted = {*found.values()} if is_exact else there
            self._holes = [slot for slot in range(self._end) if slot not in counted]
            self._count(len(counted) * self._slot_bytes)
            self._give_back(counted - {*found.values()})
        return {
            key: indexed.get(key, (now_ns, 0))[0] for key in sorted(found, key=found.__getitem__)
        }

    def _open_files(self) -> Iterator[int]:
        """Open the files that there are; return their slots, one of which there is a part, too."""
        try:
            for number in self._owned.files():
                name = self._owned.file(number)
                try:
                    self._files[number] = SlotFile.open(name, self._flags)
                    for at in range(-(-Path(name).stat().st_size // self._slot_bytes)):
                        turn, place = divmod(at, self._portion)
                        yield (turn * _FILES + number) * self._portion + place
                except OSError as error:
                    self._report("list", error)
                    self._count(allocated_bytes(Path(name)))
        except OSError as error:
            self._report("list", error)

    def _sealed(self, slots: Iterable[int], indexed: Mapping[bytes, int]) -> dict[bytes, int]:
        """Return the chunks whose seals are there.

        The slot of a removed chunk keeps its seal until it is written again or becomes a hole. So
        a key may be in two slots: then not in the one that the index names, which is older.
        """
        ordered = sorted(slots)
        parts = [ordered[at : at + _SEALS_A_JOB] for at in range(0, len(ordered), _SEALS_A_JOB)]
        found: dict[bytes, int] = {}
        with ThreadPoolExecutor(_SCAN_THREADS) as threads:
            for part in threads.map(self._read_seals, parts):
                for slot, key in part:
                    if key not in found or indexed.get(key) == found[key]:
                        found[key] = slot
        return found

    def _read_seals(self, slots: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return the slots that have a seal, and its key."""
        sealed: list[tuple[int, bytes]] = []
        page = memoryview(mmap.mmap(-1, SEAL_BYTES))
        for slot in slots:
            number, offset = self._place(slot)
            try:
                is_whole = self._files[number].read([page], offset + self._slot_bytes - SEAL_BYTES)
            except OSError as error:
                self._report("list", error)
            else:
                if is_whole and (key := self._seal.key_in(page.tobytes())):
                    sealed.append((slot, key))
        return sealed

    def save(self, keys: Sequence[bytes], first_place: int, *, is_final: bool) -> None:
        """Write the index of those of these chunks that are here."""
        with self._lock:
            is_exact = is_final and self._shrink()
            held = {**self._held}
        placed = ((place, held.get(key), key) for place, key in enumerate(keys, first_place))
        chunks = [(place, slot, key) for place, slot, key in placed if slot is not None]
        try:
            self._owned.save(chunks, is_exact=is_exact)
        except OSError as error:
            self._report("write", error)

    def _shrink(self) -> bool:
        """Give back all that holds no chunk; return whether all that is left holds one."""
        free, self._free = self._free, []
        self._give_back(free)
        holding = {self._place(slot)[0] for slot in self._held.values()}
        # If another owner has made the directory again, the files are not ours.
        for number in self._files.keys() - holding if self._owned.is_there else ():
            with contextlib.suppress(OSError):
                Path(self._owned.file(number)).unlink()
                del self._files[number]
        return self.used_bytes == len(self._held) * self._slot_bytes

    def close(self) -> None:
        """Give back what holds no chunk, let the files go, and unlock. Idempotent."""
        with self._lock:
            self._shrink()
            self._files, self._held, self._free = {}, {}, []
        self._owned.release()

    def _report(self, operation: str, error: OSError | None) -> None:
        """Log the first error of a kind, and when that operation works again."""
        if error is not None and operation not in self._failing:
            self._failing.add(operation)
            logger.warning("disk tier: cannot %s in %s: %s", operation, self.directory, error)
        elif error is None and operation in self._failing:
            self._failing.discard(operation)
            logger.info("disk tier: can %s in %s again", operation, self.directory)
