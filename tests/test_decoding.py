"""Types are described to msgspec by one thread at a time."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("router", "cacheengine", "simulator", "replay", "warmroute_common")

RACE = """
import sys, threading
import msgspec
from warmroute_common.decoding import convert, decode_json, decode_msgpack

def outer(number):
    # Types that nobody has used yet, and in one of them another.
    inner = msgspec.defstruct(f"Inner{number}", [("b", "list[str]")])
    return msgspec.defstruct(f"Outer{number}", [("y", "dict[str, int]"), ("z", inner)])

def decode_with_msgspec(body, kind):
    return msgspec.json.decode(body, type=kind)

DECODE = {
    "msgspec": (decode_with_msgspec, msgspec.json.encode),
    "decode_json": (decode_json, msgspec.json.encode),
    "decode_msgpack": (decode_msgpack, msgspec.msgpack.encode),
    "convert": (convert, lambda value: value),
}
decode, encode = DECODE[sys.argv[1]]
body = encode({"y": {"k": 1}, "z": {"b": ["q"]}})
decoded = []
sys.setswitchinterval(1e-6)
for number in range(int(sys.argv[2])):
    kind, begin = outer(number), threading.Barrier(3)

    def first_use():
        begin.wait()
        decoded.append(decode(body, kind))

    threads = [threading.Thread(target=first_use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(decoded))
"""


def race(name: str, times: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", RACE, name, str(times)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("name", ["decode_json", "decode_msgpack", "convert"])
def test_threads_may_use_a_type_first_at_the_same_time(name: str) -> None:
    ended = race(name, 300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "900\n", "")


def test_nothing_else_describes_a_type_while_threads_run() -> None:
    found = [where for package in PACKAGES for where in undescribed_uses(ROOT / package)]
    assert found == [], "use warmroute_common/decoding.py, or a decoder made at import"


def undescribed_uses(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        if path.name != "decoding.py":
            for line in uses(path.read_text()):
                yield f"{path.relative_to(ROOT)}:{line}"


def uses(source: str) -> Iterator[int]:
    """Give the lines in functions that have msgspec look at a type."""
    module = ast.parse(source)
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and looks_at_a_type(node):
                    yield node.lineno


def looks_at_a_type(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if not name.startswith("msgspec."):
        return False
    has_type = any(keyword.arg == "type" for keyword in call.keywords)
    return name.endswith(("Decoder", ".convert")) or (name.endswith(".decode") and has_type)


@pytest.mark.parametrize(
    "line",
    [
        "msgspec.json.decode(body, type=Reply)",
        "msgspec.convert(value, Reply)",
        "msgspec.msgpack.Decoder(Reply)",
    ],
)
def test_the_rule_finds_each_way(line: str) -> None:
    assert list(uses(f"def read(body):\n    return {line}\n")) == [2]
    assert list(uses(f"READ = {line}\n")) == []
