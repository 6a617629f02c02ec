"""What an engine's process does beside the engine, and the sizes that it is given."""

import subprocess
import sys

from bench.stress.settings import (
    CHUNK_BYTES,
    LONGEST_CHUNKS,
    SMALL_DISK_BYTES,
    STORE_BYTES,
    Settings,
)

_FREES = """
import threading
from pathlib import Path
from bench.stress.inside.process import give_back, keep_one_stock

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def use():
    for big in [bytearray(1 << 20) for _ in range(4)]:
        big[:] = b"x" * len(big)
    all_used.wait()

keep_one_stock()
bytearray(4 << 20)  # freed at once: from here on a block of a megabyte is no mapping of its own
before = own_bytes()
threads = [threading.Thread(target=use) for _ in range(8)]
all_used = threading.Barrier(len(threads) + 1)
for thread in threads:
    thread.start()
all_used.wait()
for thread in threads:
    thread.join()
give_back()
print(own_bytes() - before)
"""


def test_what_threads_have_freed_is_no_memory_of_an_engine() -> None:
    """The end of a thread's own stock would not be given back: megabytes of each thread."""
    done = subprocess.run(
        [sys.executable, "-c", _FREES], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 1 << 20


def test_there_is_more_than_a_tier_holds() -> None:
    """Else nothing would be evicted."""
    settings = Settings()
    chunks = settings.conversations * LONGEST_CHUNKS
    assert chunks > settings.slots + settings.disk_chunks
    assert chunks > STORE_BYTES // CHUNK_BYTES
    assert settings.disk_chunks * (CHUNK_BYTES + 4096) < SMALL_DISK_BYTES
