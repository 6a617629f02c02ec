"""The memory of the CPU pool, shared by vLLM's scheduler and its workers."""

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from vllm.distributed.device_communicators.shm_broadcast import check_shm_free_space
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from cacheengine.kept_pool import PoolSeals, open_pool_file, share_pool_file
from cacheengine.memory import HUGE_PAGE_BYTES, HugePagesMissingError, make_huge_file, pages_of

logger = logging.getLogger("vllm.warmroute")


class PoolRegion(SharedOffloadRegion):  # type: ignore[misc]
    """vLLM's shared memory region, in a file without a name.

    The kernel frees such memory with the last process that has it: a replica killed with SIGKILL,
    at any moment of its start too, leaves none. The first process creates the file, and makes the
    region's name a link to its own descriptor. The workers open it while vLLM sets up its KV cache;
    the scheduler maps it last and calls `forget_name`.

    With ``hugepages`` the file has pages of 2 MiB. If too few of them are free, it has ordinary
    pages, with a warning. The kernel unmaps whole huge pages only: if the last one is not full, its
    mapping stays until the process ends.

    With ``keep`` the file is that directory's pool file, which outlives all processes
    (`cacheengine.kept_pool`). It has ordinary pages, and behind the chunks their `seals`.

    Raises RuntimeError for a pool that is larger than what /dev/shm has free, and
    `KeepDirectoryError`.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        hugepages: bool = False,
        keep: Path | None = None,
    ) -> None:
        name = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
        size_bytes = num_chunks * kv_bytes_per_chunk
        if keep is not None:
            size_bytes += PoolSeals.size_bytes(num_chunks)
        self._file = _make_file(name, size_bytes, hugepages=hugepages, keep=keep)
        try:
            super().__init__(
                engine_id=engine_id,
                num_chunks=num_chunks,
                rank=rank,
                kv_bytes_per_chunk=kv_bytes_per_chunk,
                cpu_page_size=cpu_page_size,
            )
            if keep is not None:
                share_pool_file(self.fd)
        except BaseException:
            self._drop_file(name)
            raise

    @property
    def has_huge_pages(self) -> bool:
        """Whether this process has mapped 2 MiB pages; not valid after `cleanup`."""
        return os.fstatvfs(self.fd).f_bsize == HUGE_PAGE_BYTES

    def seals(self, identity: str) -> PoolSeals:
        """Return the index of a kept pool; ``identity`` names what chunks' bytes mean."""
        size_bytes = PoolSeals.size_bytes(self.num_chunks)
        index = mmap.mmap(self.fd, size_bytes, offset=self.total_size_bytes)
        return PoolSeals(memoryview(index), identity, self.num_chunks)

    def check_shared(self) -> None:
        """Raise ValueError, saying what to do, if no worker has mapped the region.

        The scheduler calls it before `forget_name`. The workers would be on another machine then,
        and the scheduler's tiers would store memory without KV.
        """
        if self._file is not None:
            raise ValueError(
                "vLLM's workers do not share /dev/shm with its scheduler: they are on another "
                "machine, or in another container. Start the replica where its workers run, or "
                "start vLLM without the engine (no --kv-transfer-config)"
            )

    def forget_name(self) -> None:
        """Unlink the region's name; mappings stay valid."""
        Path(self.mmap_path).unlink(missing_ok=True)

    def cleanup(self) -> None:
        """Unmap the region; unlink its name if it still exists (after a failed start)."""
        super().cleanup()
        self._drop_file(Path(self.mmap_path))

    def _drop_file(self, name: Path) -> None:
        """Close the file that this process created; unlink its name if it still exists."""
        if self._file is None:
            return
        if name.is_symlink() and str(name.readlink()) == _path_of(self._file):
            name.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None


def _make_file(name: Path, size_bytes: int, *, hugepages: bool, keep: Path | None) -> int | None:
    """Create the region's file and return its descriptor; None if the name is taken.

    The name points to the descriptor, so it stays open until all processes have mapped the file.
    """
    # Without the lock, two ranks that allocate at once could each find too few pages left.
    with _locked(name.with_suffix(".lock")):
        if os.path.lexists(name):
            return None
        file = _huge_file(name, size_bytes) if hugepages else None
        if keep is not None:
            file = open_pool_file(keep, size_bytes)
        elif file is None:
            file = _ordinary_file(name, size_bytes)
        try:
            name.symlink_to(_path_of(file))
        except BaseException as error:
            os.close(file)
            if isinstance(error, FileExistsError):  # two locks: `_locked` removes its file
                return None
            raise
        return file


def _huge_file(name: Path, size_bytes: int) -> int | None:
    try:
        file = make_huge_file(name.name, size_bytes)
    except HugePagesMissingError as error:
        logger.warning("local_cpu_use_hugepages: %s. The pool uses ordinary pages instead", error)
        return None
    logger.info("the pool uses %d huge pages of 2 MiB", pages_of(size_bytes))
    return file


def _ordinary_file(name: Path, size_bytes: int) -> int:
    check_shm_free_space(size_bytes, allocation_name="the CPU pool (max_local_cpu_size)")
    file = os.open(name.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(file, size_bytes)
    return file


def _path_of(file: int) -> str:
    """Return the path under which other processes of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{file}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, then remove the file (waiting processes have it open)."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)
