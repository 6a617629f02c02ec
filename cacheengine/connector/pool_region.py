"""The memory of the CPU pool, shared by vLLM's scheduler and its workers."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from cacheengine.memory import HUGE_PAGE_BYTES, HugePagesMissingError, make_huge_file, pages_of

logger = logging.getLogger("vllm.warmroute")


class PoolRegion(SharedOffloadRegion):  # type: ignore[misc]
    """vLLM's shared memory region, which is unlinked as soon as all processes have mapped it.

    The workers map the region while vLLM sets up its KV cache. The scheduler maps it last and calls
    `forget_name`. From then on the kernel frees the memory with the last process: a replica killed
    with SIGKILL leaves nothing in /dev/shm.

    With ``hugepages`` the first process creates a nameless file of 2 MiB pages, and makes the
    region's name a link to its own descriptor. If too few huge pages are free, it logs a warning
    and creates the ordinary file. All other processes map whatever the name points to, so they
    always agree.

    The kernel unmaps whole huge pages only: if the last one is not full, its mapping stays until
    the process ends.
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
    ) -> None:
        self._huge_file: int | None = None
        size_bytes = num_chunks * kv_bytes_per_chunk
        refused = "vLLM has its memory elsewhere"
        name = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
        if hugepages:
            try:
                self._huge_file = _give_name_to_huge_file(name, size_bytes)
            except HugePagesMissingError as error:
                refused = str(error)
        try:
            super().__init__(
                engine_id=engine_id,
                num_chunks=num_chunks,
                rank=rank,
                kv_bytes_per_chunk=kv_bytes_per_chunk,
                cpu_page_size=cpu_page_size,
            )
        except BaseException:
            self._drop_huge_file(name)
            raise
        if hugepages and self._creator:
            self._drop_huge_file(name)
            logger.warning(
                "local_cpu_use_hugepages: %s. The pool uses ordinary pages instead", refused
            )
        elif self._huge_file is not None:
            logger.info("the pool uses %d huge pages of 2 MiB", pages_of(size_bytes))

    @property
    def has_huge_pages(self) -> bool:
        """Whether this process has mapped 2 MiB pages; not valid after `cleanup`."""
        return os.fstatvfs(self.fd).f_bsize == HUGE_PAGE_BYTES

    def check_shared(self) -> None:
        """Raise ValueError, saying what to do, if no worker has mapped the region.

        The scheduler calls it before `forget_name`. The workers would be on another machine then,
        and the scheduler's tiers would store memory without KV.
        """
        if self._creator or self._huge_file is not None:
            raise ValueError(
                "vLLM's workers do not share /dev/shm with its scheduler: they are on another "
                "machine, or in another container. Start the replica where its workers run, or "
                "start vLLM without the engine (no --kv-transfer-config)"
            )

    def forget_name(self) -> None:
        """Unlink the backing file; mappings stay valid."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.mmap_path).unlink()
        self._creator = False

    def cleanup(self) -> None:
        """Unmap the region; unlink its name if it still exists (after a failed start)."""
        if self._creator and not Path(self.mmap_path).exists():
            self._creator = False
        super().cleanup()
        self._drop_huge_file(Path(self.mmap_path))

    def _drop_huge_file(self, name: Path) -> None:
        """Close the huge file that this process created; unlink its name if it still exists."""
        if self._huge_file is None:
            return
        if _names(name, self._huge_file):
            name.unlink(missing_ok=True)
        os.close(self._huge_file)
        self._huge_file = None


def _give_name_to_huge_file(name: Path, size_bytes: int) -> int | None:
    """Create the region's huge file and return its descriptor; None if the name is taken.

    The name points to the descriptor, so it stays open until all processes have mapped the file.
    Raises `HugePagesMissingError`.
    """
    # Without the lock, two ranks that allocate at once could each find too few pages left.
    with _locked(name.with_suffix(".lock")):
        if os.path.lexists(name):
            return None
        file = make_huge_file(name.name, size_bytes)
        try:
            name.symlink_to(_path_of(file))
        except FileExistsError:
            # Another rank has found too few free pages, released the lock, and has created the
            # ordinary file meanwhile.
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        return file


def _path_of(file: int) -> str:
    """Return the path under which other processes of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _names(name: Path, file: int) -> bool:
    return name.is_symlink() and str(name.readlink()) == _path_of(file)


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
