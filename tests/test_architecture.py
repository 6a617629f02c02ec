"""The directions between packages, and rules that hold for every module."""

import ast
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TOP_LEVEL: dict[str, set[str]] = {
    "warmroute_common": set(),
    "router": {"warmroute_common"},
    "cacheengine": {"warmroute_common"},
    "simulator": {"cacheengine", "warmroute_common"},
    "replay": {"router", "cacheengine", "simulator", "warmroute_common"},
}
"""Which of our packages a package may import."""

ROUTER: dict[str, set[str]] = {
    "config": set(),
    "index": set(),
    "prompt": {"config"},
    "launch": {"config", "gateway"},
    "fleet": {"config", "index"},
    "scheduling": {"config", "index", "fleet"},
    "staging": {"config", "fleet"},
    "record": {"config", "index", "fleet", "staging"},
    "waste": {"prompt", "index", "fleet", "record"},
    "ui": {"index", "fleet", "record"},
    "lmcache": {"config", "api", "index", "fleet", "staging"},
    "membership": {"config", "fleet"},
    "feeds": {"config", "prompt", "index", "fleet", "staging", "record"},
    "cli": {"config", "api", "doctor", "gateway", "launch", "lmcache", "membership"},
    "doctor": {
        *("config", "prompt", "index", "fleet", "staging", "lmcache", "feeds", "launch"),
    },
    "proxy": {
        *("config", "api", "prompt", "index"),
        *("fleet", "scheduling", "staging", "record", "waste"),
    },
    "api": {
        *("config", "prompt", "index", "fleet", "membership", "feeds"),
        *("record", "proxy", "waste"),
    },
    "gateway": {"config", "index", "fleet", "record", "proxy"},
}
"""Which packages of the router a package of it may import. Modules outside may import any."""

ENGINE: dict[str, set[str]] = {
    "identity": set(),
    "tiers": set(),
    "residency": {"tiers"},
    "settings": {"residency", "tiers"},
    "engine": {"identity", "residency", "settings", "tiers"},
    "transfer": {"engine", "residency"},
    "agent": {"engine", "identity", "residency", "settings", "transfer"},
    "launch": {"settings"},
    "connector": {
        *("identity", "settings", "tiers", "residency", "engine", "transfer", "agent", "launch"),
    },
}
"""The same for the engine."""

INSIDE = {"router": ROUTER, "cacheengine": ENGINE}

PURE = (
    "router.index",
    "router.fleet",
    "router.scheduling",
    "cacheengine.residency",
    "simulator.model",
)
"""Packages that do no I/O and read no clock: time is an argument."""
IMPURE_IMPORTS = {
    "aiohttp",
    "asyncio",
    "os",
    "pathlib",
    "random",
    "requests",
    "secrets",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "time",
    "uvloop",
    "zmq",
}
WAITS_ONLY = {
    "router.scheduling.admission": {"asyncio"},
    "router.scheduling.no_replica_queue": {"asyncio"},
}
"""Modules of these packages that wait, with what they may import for that."""


@cache
def modules(package: str) -> dict[str, Path]:
    """Return the modules of a package with their files."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree: parsing all files takes long, and every test here needs it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path, *, at_runtime: bool = True) -> tuple[str, ...]:
    """Return the names of what a file imports, as dotted modules."""
    return tuple(_imports(parsed(path), at_runtime))


def _imports(tree: ast.Module, at_runtime: bool) -> Iterator[str]:
    skipped = _type_checking_only(tree) if at_runtime else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes under ``if TYPE_CHECKING:``."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found.update(child for part in node.body for child in ast.walk(part))
    return found


def _package_inside(name: str) -> str | None:
    """Return the package inside a top-level one that a module belongs to."""
    top, *rest = name.split(".")
    return rest[0] if rest and rest[0] in INSIDE.get(top, {}) else None


@pytest.mark.parametrize("package", TOP_LEVEL)
def test_a_top_level_package_imports_what_it_may(package: str) -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules(package).items()
        for imported in imports(path, at_runtime=False)
        if (top := imported.split(".")[0]) in (*TOP_LEVEL, "bench", "tests", "tools")
        and top != package
        and top not in TOP_LEVEL[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", INSIDE)
def test_a_package_inside_imports_what_it_may(package: str) -> None:
    wrong = []
    folders = {each.parent.name for each in (ROOT / package).glob("*/__init__.py")}
    assert folders == set(INSIDE[package])
    for name, path in modules(package).items():
        mine = _package_inside(name)
        for imported in imports(path, at_runtime=False):
            theirs = _package_inside(imported) if imported.startswith(f"{package}.") else None
            if None in (mine, theirs) or theirs == mine:
                continue
            if theirs not in INSIDE[package][mine or ""]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize(
    "package", ["warmroute_common", "router", "cacheengine", "simulator", "replay", "bench"]
)
def test_imports_have_no_cycles(package: str) -> None:
    known = modules(package)
    graph = {
        name: {each for each in _closest(imports(path), known) if each != name}
        for name, path in known.items()
    }
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for each in graph[name]:
                walk(each, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def _closest(imported: Iterable[str], known: Container[str]) -> set[str]:
    """Return the known modules: a room's module that is imported from its face, not the face."""
    found = {each for each in imported if each in known}
    return found - {each.rpartition(".")[0] for each in found}


def test_only_the_connector_knows_vllm() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules("cacheengine").items()
        for imported in imports(path)
        if imported.split(".")[0] in ("vllm", "torch")
        and not name.startswith("cacheengine.connector")
    ]
    assert not wrong


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_do_no_io_and_read_no_clock(package: str) -> None:
    known = modules(package.partition(".")[0])
    mine = {name: path for name, path in known.items() if f"{name}.".startswith(f"{package}.")}
    assert mine
    wrong = [
        f"{name} imports {each}"
        for name, path in mine.items()
        for each in imports(path)
        if each.split(".")[0] in IMPURE_IMPORTS - WAITS_ONLY.get(name, set())
    ]
    assert not wrong


def test_no_module_keeps_state_in_globals() -> None:
    """An assigned list, dict or set at module level is a constant: typed Final, or upper case."""
    wrong = []
    for package in TOP_LEVEL:
        for name, path in modules(package).items():
            tree = parsed(path)
            assigned = [each for each in tree.body if isinstance(each, ast.Assign | ast.AnnAssign)]
            wrong += [f"{name}:{each.lineno}" for each in assigned if _is_mutable_global(each)]
            said = [each for each in ast.walk(tree) if isinstance(each, ast.Global)]
            wrong += [f"{name}:{each.lineno} (global)" for each in said]
    assert not wrong


def _is_mutable_global(node: ast.Assign | ast.AnnAssign) -> bool:
    if not isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    is_final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
    return not is_final and not all(name.isupper() or name == "__all__" for name in names)


def test_the_router_loads_neither_torch_nor_vllm() -> None:
    heavy = ("torch", "vllm", "transformers", "numpy")
    code = (
        "import sys, router, router.app, router.cli.serve, router.cli.commands\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
