"""An engine process ends when its parent is killed; nobody else does."""

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, signal, sys, time
from cacheengine.connector.spec import exit_with_parent

def engine(deaf):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_with_parent(grace_s=0.1)
    print("watching", flush=True)
    while True:
        signal.pause()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    context.Process(target=engine, args=(sys.argv[2] == "deaf",)).start()
    signal.pause()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("hearing", ["hears", "deaf"])
def test_the_engine_ends_with_a_killed_server(method: str, hearing: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, script, method, hearing], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        # The engine holds the other end of the pipe until it ends.
        assert parent.stdout.read() == ""


def test_a_process_of_somebodys_shell_is_left_alone() -> None:
    code = (
        "import threading; from cacheengine.connector.spec import exit_with_parent;"
        "exit_with_parent(); print(threading.active_count())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert result.stdout.strip() == "1"
