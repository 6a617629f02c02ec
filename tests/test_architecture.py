"""The directions between modules, and what every public thing owes its reader."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each row may import the rows after it and its own, never one before it.
# A module that is not named is a part of its row's work (`ROUTER_PARTS`), or new:
# then say here where it belongs.
ROUTER_LAYERS = (
    ("__main__", "cli"),
    ("up", "serve", "explain", "processes"),
    ("app",),
    ("api", "proxy", "health", "controller", "metrics"),
    ("admitting",),
    ("admission",),
    ("policy", "upstream", "prefetch", "feeds", "fleet"),
    ("prefix_index", "holders", "matches", "sessions", "tokens"),
    ("replica", "config", "errors"),
)

ROUTER_MAY_IMPORT_OF_ENGINE = {"cacheengine.keys", "cacheengine.wire"}

ENGINE_LAYERS = (
    ("connector", "agent", "cli", "launch"),
    ("transfer",),
    ("engine",),
    ("index", "eviction", "tiers"),
    ("pool", "chunk", "keys"),
)

PURE = (
    "router.policy",
    "router.placement",
    "router.assess",
    "router.keyring",
    "router.roster",
    "router.waiting_line",
    "router.admission",
    "router.costs",
    "router.prediction_errors",
    "router.prefill_line",
    "router.prefix_index",
    "router.holders",
    "router.matches",
    "router.sessions",
    "router.session_chains",
    "router.rhythm",
    "router.fleet",
    "router.unseen",
    "router.controller_registry",
    "cacheengine.index",
    "cacheengine.eviction",
    "cacheengine.tier_index",
    "cacheengine.remote_index",
    "cacheengine.residency",
    "cacheengine.ledger",
    "cacheengine.puts",
    "cacheengine.promotions",
    "cacheengine.pins",
)
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
    "threading",
    "time",
    "uvloop",
    "zmq",
}


def modules(package: str) -> dict[str, Path]:
    """Return the modules of a package with their files."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, at_runtime: bool = True) -> Iterator[str]:
    """Yield the names of what a file imports, as dotted modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
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


def _layer(name: str, layers: tuple[tuple[str, ...], ...], package: str) -> int | None:
    parts = name.split(".")
    if parts[0] != package or len(parts) < 2:
        return None
    return next((i for i, layer in enumerate(layers) if parts[1] in layer), None)


@pytest.mark.parametrize(
    ("package", "layers"), [("router", ROUTER_LAYERS), ("cacheengine", ENGINE_LAYERS)]
)
def test_imports_go_one_way(package: str, layers: tuple[tuple[str, ...], ...]) -> None:
    wrong = []
    for name, path in modules(package).items():
        mine = _layer(name, layers, package)
        if mine is None:
            continue
        for imported in imports(path):
            theirs = _layer(imported, layers, package)
            if theirs is not None and theirs < mine:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("package", ["router", "cacheengine", "bench"])
def test_imports_have_no_cycles(package: str) -> None:
    known = modules(package)
    graph = {
        name: {each for each in imports(path) if each in known and each != name}
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


def test_the_router_takes_only_keys_and_wire_from_the_engine() -> None:
    wrong = []
    for name, path in modules("router").items():
        for imported in imports(path, at_runtime=False):
            module = ".".join(imported.split(".")[:2])
            if module.startswith("cacheengine.") and module not in ROUTER_MAY_IMPORT_OF_ENGINE:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_the_engine_never_imports_the_router() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules("cacheengine").items()
        for imported in imports(path, at_runtime=False)
        if imported.split(".")[0] == "router"
    ]
    assert not wrong


def test_only_the_agent_speaks_http_and_only_the_connector_knows_vllm() -> None:
    wrong = []
    for name, path in modules("cacheengine").items():
        for imported in imports(path):
            top = imported.split(".")[0]
            if top == "aiohttp" and not name.startswith("cacheengine.agent"):
                wrong.append(f"{name} imports {imported}")
            if top in ("vllm", "torch") and not name.startswith("cacheengine.connector"):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_do_no_io_and_read_no_clock(name: str) -> None:
    path = modules(name.split(".", maxsplit=1)[0]).get(name)
    if path is None:
        pytest.fail(f"{name} is gone: take it out of PURE, or name its successor")
    impure = {each for each in imports(path) if each.split(".")[0] in IMPURE_IMPORTS}
    assert not impure


def test_no_module_keeps_state_in_globals() -> None:
    """An assigned list, dict or set at module level is a constant: typed Final, or upper case."""
    wrong = []
    for package in ("router", "cacheengine"):
        for name, path in modules(package).items():
            tree = ast.parse(path.read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("package", ["router", "cacheengine", "bench"])
def test_public_things_have_docstrings(package: str) -> None:
    missing = []
    for name, path in modules(package).items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(name)
        missing += [f"{name}.{each}" for each in _undocumented(tree)]
    assert not missing


def _undocumented(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in scope.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and not _is_overload(node):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{each}" for each in _undocumented(node))


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each).endswith("overload") for each in node.decorator_list)


@pytest.mark.parametrize("package", ["router", "cacheengine", "bench", "tests", "tools"])
def test_files_stay_small_and_have_a_subject(package: str) -> None:
    too_long = {}
    for path in (ROOT / package).rglob("*.py"):
        assert path.stem not in ("utils", "helpers", "misc"), path
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 400 and package != "tests":
            too_long[path.name] = lines
    assert not too_long


def test_the_router_loads_neither_torch_nor_vllm() -> None:
    heavy = ("torch", "vllm", "transformers", "numpy")
    code = (
        "import sys, router, router.app, router.serve, router.cli\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_every_name_in_the_layers_is_a_module() -> None:
    gone = [
        f"{package}.{name}"
        for package, layers in (("router", ROUTER_LAYERS), ("cacheengine", ENGINE_LAYERS))
        for layer in layers
        for name in layer
        if name != "__main__" and importlib.util.find_spec(f"{package}.{name}") is None
    ]
    assert not gone
