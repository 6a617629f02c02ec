"""An engine process ends when its parent is killed; nobody else does."""

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, signal, sys, threading
from cacheengine.connector.spec import exit_with_parent

def engine(deaf):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_with_parent(grace_s=0.1)
    print("watching", flush=True)
    while True:
        signal.pause()

if __name__ == "__main__":
    exit_with_parent()  # this one a shell has started
    print("threads:", threading.active_count(), flush=True)
    context = multiprocessing.get_context(sys.argv[1])
    for deaf in (False, True):
        context.Process(target=engine, args=(deaf,)).start()
    signal.pause()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_ends_with_a_killed_server_even_if_deaf_to_sigterm(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, script, method], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "threads: 1\n", "a process of somebody's shell stays"
        assert [parent.stdout.readline() for _ in range(2)] == ["watching\n"] * 2
        parent.kill()
        # Each engine holds the other end of the pipe until it ends.
        assert parent.stdout.read() == ""
