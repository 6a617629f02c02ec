"""A CPU pool that outlives its processes: a file on a tmpfs, and a seal for each whole chunk.

The file has the slots, then the index: one seal for each slot. A seal names the slot's chunk and
the checksum of its bytes. The next process serves a chunk only if the seal is sound and the bytes
have this checksum.

A process can be killed at any instant, in the middle of any write. Chunks without a seal are lost
then. No seal is wrong, for three reasons:

- A slot is sealed after its bytes are whole, and unsealed before anything else may be written to
  it: both are single stores of 8 bytes.
- A seal has a checksum of its own, which covers what the chunks' bytes mean and the number of
  slots. So a seal that is half written, or another model's, is no seal.
- A seal counts in one generation of the pool. Clearing the pool begins the next one, by one store.

The index also has the order in which the chunks were used. That is a hint: any order is right.
"""

import fcntl
import os
import stat
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from warmroute_common.config_reader import BadValueError

_HEAD_BYTES: Final = 64
_WORD_BYTES: Final = 8
_SEAL: Final = struct.Struct("<Q16s16sB55s")
"""Generation, checksum of the chunk's bytes, that of the seal, length of the key, the key."""
_SEAL_WORDS: Final = _SEAL.size // _WORD_BYTES
_LONGEST_KEY: Final = 55
_MOST_GENERATIONS: Final = 1 << 62
_FILE_NAME: Final = "pool"
_IN_USE: Final = (
    "its pool is in use by another replica",
    "give each replica a directory of its own",
)
_LOCK_WAIT_S: Final = 15.0
"""Long enough for a predecessor to exit."""
_LOCK_POLL_S: Final = 0.05


class KeepDirectoryError(BadValueError):
    """A directory cannot keep a pool: ``str()`` is one line with why, and what to do."""

    def __str__(self) -> str:
        return f"keep_cpu_dir: {self.problem}; {self.fix}"


def check_keep_directory(directory: Path) -> None:
    """Create a directory for kept pools. Raises `KeepDirectoryError` unless it is on a tmpfs."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        device = directory.stat().st_dev
    except OSError as error:
        raise KeepDirectoryError(
            f"{directory} cannot be created ({error.strerror})", "name a directory below /dev/shm"
        ) from None
    found = _filesystem(device)
    if found != "tmpfs":
        raise KeepDirectoryError(
            f"{directory} is on {found}, not in memory",
            "name a directory on a tmpfs, such as one below /dev/shm",
        )


def _filesystem(device: int) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return "an unknown file system"


def open_pool_file(directory: Path, size_bytes: int, *, wait_s: float = _LOCK_WAIT_S) -> int:
    """Return the descriptor of a directory's pool file, with what an earlier process has left.

    A file of another size is emptied first: its memory is free again. The descriptor has a shared
    lock (`share_pool_file`), which nobody had before. Raises `KeepDirectoryError`, also if another
    process has the lock for longer than ``wait_s``.
    """
    check_keep_directory(directory)
    path = directory / _FILE_NAME
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise KeepDirectoryError(f"{path}: {error.strerror}", "remove it") from None
    try:
        _lock(file, wait_s)
        _check_own(os.fstat(file), path)
        if os.fstat(file).st_size != size_bytes:
            os.ftruncate(file, 0)
            os.ftruncate(file, size_bytes)
        _check_space(file, directory, size_bytes)
        share_pool_file(file)
    except BaseException:
        os.close(file)
        raise
    return file


def share_pool_file(file: int) -> None:
    """Lock an open pool file until the descriptor is closed, as each process that maps it must.

    So no other replica takes the file while a process of this one could still write to it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it had no lock for an instant
        raise KeepDirectoryError(*_IN_USE) from None


def _lock(file: int, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise KeepDirectoryError(*_IN_USE) from None
            time.sleep(_LOCK_POLL_S)


def _check_own(found: os.stat_result, path: Path) -> None:
    """Refuse a file that someone else can write: its chunks would be served."""
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    if not is_own or found.st_mode & 0o077:
        raise KeepDirectoryError(f"{path} can be written by others", "remove it")


def _check_space(file: int, directory: Path, size_bytes: int) -> None:
    """Refuse a pool for which the tmpfs has no room: its first use would end the process."""
    space = os.fstatvfs(file)
    free_bytes = space.f_bavail * space.f_frsize + os.fstat(file).st_blocks * 512
    if space.f_blocks and free_bytes < size_bytes:  # without a limit it has no blocks
        os.ftruncate(file, 0)
        raise KeepDirectoryError(
            f"{directory} has {free_bytes >> 20} MiB free, and the CPU pool (max_local_cpu_size) "
            f"takes {size_bytes >> 20}",
            "raise the limit of the tmpfs, or lower max_local_cpu_size",
        )


class Seal(NamedTuple):
    """What a slot holds."""

    slot: int
    key: bytes
    digest: bytes
    """`bulk.checksum` of the chunk's bytes."""


class PoolSeals:
    """The index of a kept pool. The caller serializes calls; all but the constructor are fast.

    ``identity`` names what chunks' bytes mean, and their size. ``kept`` are the chunks that earlier
    processes have left, those first whose last use is longest ago. Their bytes must be compared
    with their checksums before they are used.
    """

    def __init__(self, index: memoryview, identity: str, num_slots: int) -> None:
        self._bytes = index.cast("B")[: self.size_bytes(num_slots)]
        self._words = self._bytes.cast("Q")
        self._salt = f"{identity}:{num_slots}:".encode()
        self._first_seal = _HEAD_BYTES + num_slots * _WORD_BYTES
        self._num_slots = num_slots
        self.kept = self.read()
        if not self.kept:
            # Nothing of it means anything here. The generation comes last: with another one, seals
            # that are not wiped yet could count again.
            self._bytes[_HEAD_BYTES:] = bytes(len(self._bytes) - _HEAD_BYTES)
            self._words[0] = self._words[0] % _MOST_GENERATIONS or 1
        sound = {seal.slot for seal in self.kept}
        for slot in range(num_slots):
            if slot not in sound:
                self.drop(slot)
        first = _HEAD_BYTES // _WORD_BYTES
        self.kept.sort(key=lambda seal: self._words[first + seal.slot])
        self._uses = max(self._words[first : first + num_slots])

    @staticmethod
    def size_bytes(num_slots: int) -> int:
        return _HEAD_BYTES + num_slots * (_WORD_BYTES + _SEAL.size)

    def has(self, slot: int) -> bool:
        return self._words[self._word(slot)] == self._words[0]

    def write(self, seal: Seal) -> None:
        """Seal a slot whose bytes are whole and stay as they are until `drop`.

        A chunk with a longer key than vLLM has ever made is not kept.
        """
        if len(seal.key) > _LONGEST_KEY:
            return
        generation = self._words[0]
        start = self._first_seal + seal.slot * _SEAL.size
        proof = self._proof(generation, seal)
        content = (seal.digest, proof, len(seal.key), seal.key)
        # With generation 0 until the rest is there.
        _SEAL.pack_into(self._bytes, start, 0, *content)
        self._words[self._word(seal.slot)] = generation

    def drop(self, slot: int) -> None:
        """Unseal a slot: its chunk is not found after the next start."""
        self._words[self._word(slot)] = 0

    def drop_all(self) -> None:
        """Unseal all slots, in one step."""
        self._words[0] += 1

    def note_use(self, slot: int) -> None:
        """Make the slot's chunk the last to leave after the next start."""
        self._uses += 1
        self._words[_HEAD_BYTES // _WORD_BYTES + slot] = self._uses

    def read(self) -> list[Seal]:
        """Return all sound seals. Slow."""
        slots = range(self._num_slots)
        return [seal for slot in slots if (seal := self._read(slot)) is not None]

    def close(self) -> None:
        """Release the memory, so that its owner can unmap it."""
        self._words.release()
        self._bytes.release()

    def _word(self, slot: int) -> int:
        return self._first_seal // _WORD_BYTES + slot * _SEAL_WORDS

    def _read(self, slot: int) -> Seal | None:
        if not self.has(slot):
            return None
        start = self._first_seal + slot * _SEAL.size
        generation, digest, proof, length, key = _SEAL.unpack_from(self._bytes, start)
        seal = Seal(slot, key[:length], digest)
        return seal if proof == self._proof(generation, seal) else None

    def _proof(self, generation: int, seal: Seal) -> bytes:
        parts = self._salt + struct.pack("<QQ", generation, seal.slot) + seal.digest + seal.key
        return xxhash.xxh3_128(parts).digest()
