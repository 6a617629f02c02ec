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
    """vLLM's shared region, whose name goes as soon as all processes have mapped it.

    The workers map the region while vLLM sets up its KV cache, the scheduler
    after them: it is the last, and calls `forget_name`. From then on the
    kernel frees the memory with the last process, however that ends: a
    replica killed with SIGKILL leaves nothing in /dev/shm.

    With ``hugepages`` the first process makes a nameless file of 2 MiB pages
    and gives it the region's name, as a link to its own descriptor; where too
    few pages are there it says so, and makes the ordinary file. Every other
    process maps what it finds under the name. So they all agree, whatever
    they themselves could have had.

    Huge pages are unmapped whole: if the last is not filled, the kernel keeps
    the mapping until the process ends.
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
                "local_cpu_use_hugepages: %s. The pool is made of ordinary pages now", refused
            )
        elif self._huge_file is not None:
            logger.info("the pool is made of %d huge pages of 2 MiB", pages_of(size_bytes))

    @property
    def has_huge_pages(self) -> bool:
        """Whether what this process has mapped are 2 MiB pages; not after `cleanup`."""
        return os.fstatvfs(self.fd).f_bsize == HUGE_PAGE_BYTES

    def check_shared(self) -> None:
        """Raise ValueError, with the way out, in the scheduler where no worker has mapped it.

        Then the workers are elsewhere, and what the scheduler's tiers kept would not be KV.
        To be called before `forget_name`.
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
        """Unmap; the name is unlinked if it still exists (a start that failed)."""
        if self._creator and not Path(self.mmap_path).exists():
            self._creator = False
        super().cleanup()
        self._drop_huge_file(Path(self.mmap_path))

    def _drop_huge_file(self, name: Path) -> None:
        """Close the huge file that this process made; its name goes, if it still has one."""
        if self._huge_file is None:
            return
        if _names(name, self._huge_file):
            name.unlink(missing_ok=True)
        os.close(self._huge_file)
        self._huge_file = None


def _give_name_to_huge_file(name: Path, size_bytes: int) -> int | None:
    """Make the region's huge file, unless the name is taken; return its descriptor.

    The descriptor is what the name points to, so it stays open until all
    processes have mapped the file. Raises `HugePagesMissingError`.
    """
    # Two ranks that allocate at once could each find too few pages left.
    with _locked(name.with_suffix(".lock")):
        if os.path.lexists(name):
            return None
        file = make_huge_file(name.name, size_bytes)
        try:
            name.symlink_to(_path_of(file))
        except FileExistsError:
            # A rank that found too few free pages a moment ago has left the
            # lock and has made the ordinary file by now.
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        return file


def _path_of(file: int) -> str:
    """Return where other processes of this user find an open file."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _names(name: Path, file: int) -> bool:
    return name.is_symlink() and str(name.readlink()) == _path_of(file)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, alone; it goes afterwards (a waiting process has it open)."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)
