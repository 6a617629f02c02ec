"""The memory of the CPU pool, shared by vLLM's scheduler and its workers."""

import contextlib
from pathlib import Path

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class PoolRegion(SharedOffloadRegion):  # type: ignore[misc]
    """vLLM's shared region, whose name goes as soon as everybody has mapped it.

    The workers map the region while vLLM sets up its KV cache, the scheduler
    after them: it is the last, and calls `forget_name`. From then on the
    kernel frees the memory with the last process, however that ends: a
    replica killed with SIGKILL leaves nothing in /dev/shm.
    """

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
