"""A router as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a router whose only replica is down; yield the process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "serve", "--replica", "http://127.0.0.1:1", *args],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "OPENAI_BASE_URL=" in line:
                    break
            url = line.split("OPENAI_BASE_URL=")[1].strip('"}\n').removesuffix("/v1")
            yield process, url
        finally:
            process.kill()
