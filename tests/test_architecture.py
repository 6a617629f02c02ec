"""The directions between modules, and what every public thing owes its reader."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Which rooms a room may import. A new room is added here, with a face that says the same.
ROUTER_ROOMS = {
    "config": set(),
    "residency": set(),
    "tasks": set(),
    "failures": {"config"},
    "terminal": set(),
    "http": {"config"},
    "access": {"config", "http"},
    "prompt": {"config"},
    "latency": {"config"},
    "envoy": {"config"},
    "launch": {"config", "envoy"},
    "fleet": {"config", "failures", "residency", "latency"},
    "admission": {"config", "latency", "fleet"},
    "staging": {"config", "fleet", "tasks"},
    "record": {"config", "failures", "residency", "fleet", "staging"},
    "ui": {"http", "residency", "fleet", "record"},
    "controller": {"config", "http", "access", "staging"},
    "lmcache": {"config", "http", "residency", "fleet", "staging", "tasks"},
    "membership": {"config", "fleet", "tasks"},
    "feeds": {"config", "prompt", "residency", "fleet", "staging", "record", "tasks"},
    "doctor": {
        *("config", "prompt", "residency", "fleet", "staging", "lmcache", "feeds", "launch"),
        "tasks",
    },
    "proxy": {
        *("config", "http", "access", "prompt", "residency", "latency", "failures"),
        *("fleet", "admission", "staging", "record"),
    },
    "picker": {
        *("config", "envoy", "http", "residency", "fleet", "record", "proxy", "tasks"),
    },
}
ENGINE_ROOMS = {
    "identity": set(),
    "memory": set(),
    "record": set(),
    "tiers": set(),
    "residency": {"record", "tiers"},
    "settings": {"memory", "residency", "tiers"},
    "engine": {"identity", "memory", "record", "residency", "settings", "tiers"},
    "transfer": {"engine", "residency", "record"},
    "agent": {"engine", "identity", "record", "residency", "settings", "transfer"},
    "launch": {"settings"},
    "connector": {
        *("identity", "memory", "record", "settings", "tiers", "residency", "engine"),
        *("transfer", "agent", "launch"),
    },
    "simulator": {
        *("identity", "memory", "record", "settings", "tiers", "residency", "engine"),
        *("transfer", "agent"),
    },
}
ROOMS: dict[str, dict[str, set[str]]] = {"router": ROUTER_ROOMS, "cacheengine": ENGINE_ROOMS}
BESIDE_THE_ROOMS = {
    "router": (
        ("__main__",),
        ("cli",),
        ("serve", "explain", "plugins"),
        ("app",),
        ("parts",),
        ("own_endpoints", "replica_endpoints", "cors"),
        ("explanation",),
    ),
    "cacheengine": (("wire", "values"), ("keys", "address", "trust", "bulk")),
}
"""A row may import the rows after it: the router's lie above its rooms, the engine's below."""
LARGEST_ROOM_MODULES = 12

SPEAK_HTTP = ("cacheengine.agent", "cacheengine.simulator")

ROUTER_MAY_IMPORT_OF_ENGINE = {"cacheengine.keys", "cacheengine.trust", "cacheengine.wire"}

SIMULATED_GPU = tuple(
    f"cacheengine.simulator.model.{path.stem}"
    for path in (ROOT / "cacheengine/simulator/model").glob("[!_]*.py")
)
PURE = (
    "router.doctor.findings",
    "router.doctor.fleet_checks",
    "router.failures.breaker",
    "router.failures.retries",
    "router.access.budget",
    "router.access.grant",
    "router.ui.recent",
    "router.ui.state",
    "router.ui.ttfts",
    "router.fleet.policy",
    "router.fleet.placement",
    "router.fleet.assessment",
    "router.fleet.candidate",
    "router.fleet.decision",
    "router.fleet.shortlist",
    "router.residency.block_hashes",
    "router.fleet.eligibility",
    "router.admission.queue",
    "router.admission.gate",
    "router.latency.ttft_model",
    "router.latency.work",
    "router.latency.prediction_errors",
    "router.latency.replica_queue",
    "router.residency.claims",
    "router.residency.kv_events",
    "router.residency.prefix_index",
    "router.residency.replica_sets",
    "router.residency.lmcache_keys",
    "router.residency.matches",
    "router.fleet.sessions",
    "router.fleet.fleet",
    "router.fleet.holdings",
    "router.fleet.phases",
    "router.controller.registry",
    "router.lmcache.coordinator.state",
    "router.lmcache.coordinator.directory",
    "router.lmcache.coordinator.records",
    "router.lmcache.members",
    "router.lmcache.coordinator.pins",
    "router.lmcache.coordinator.quotas",
    "router.lmcache.ties",
    "router.lmcache.coordinator.usage",
    "router.lmcache.wire",
    "router.lmcache.workers.agreement",
    "router.lmcache.workers.binding",
    "router.lmcache.workers.holdings",
    "router.lmcache.workers.registry",
    "router.lmcache.workers.words",
    "router.lmcache.workers.worker",
    "router.residency.python_hash",
    "cacheengine.residency.pool_index",
    "cacheengine.residency.cleared",
    "cacheengine.residency.pins",
    "cacheengine.residency.eviction.arc",
    "cacheengine.residency.eviction.policies",
    "cacheengine.residency.eviction.queue",
    "cacheengine.residency.lower.local_index",
    "cacheengine.residency.lower.shared_index",
    "cacheengine.residency.decider",
    "cacheengine.residency.shards",
    "cacheengine.residency.state",
    "cacheengine.residency.stores",
    "cacheengine.residency.cascade",
    "cacheengine.residency.promoter",
    "cacheengine.residency.walks",
    *SIMULATED_GPU,
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


def _room(name: str, package: str) -> str | None:
    """Return the room of a module; None for those beside the rooms, and other packages'."""
    top, *inside = name.split(".")
    return inside[0] if top == package and inside and inside[0] in ROOMS[package] else None


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_what_they_may_and_by_its_face(package: str) -> None:
    known, wrong = modules(package), []
    for name, path in known.items():
        mine = _room(name, package)
        for imported in _closest(imports(path, at_runtime=False), known):
            theirs = _room(imported, package)
            if theirs is None or theirs == mine:
                continue
            if mine is not None and theirs not in ROOMS[package][mine]:
                wrong.append(f"{name} imports {imported}")
            if known[imported].stem not in ("__init__", theirs):
                wrong.append(f"{name} passes by the face of {imported}")
    assert not wrong


@pytest.mark.parametrize("package", BESIDE_THE_ROOMS)
def test_what_stands_beside_the_rooms_goes_one_way(package: str) -> None:
    rows, known, wrong = BESIDE_THE_ROOMS[package], modules(package), []
    row_of = {f"{package}.{each}": at for at, row in enumerate(rows) for each in row}
    beside = {name for name in known if name != package and _room(name, package) is None}
    assert beside == set(row_of)
    for name, path in known.items():
        # Where the rooms come before what stands beside them, or after it.
        mine = row_of.get(name, len(rows) if package == "router" else -1)
        for imported in _closest(imports(path, at_runtime=False), known):
            if row_of.get(imported, mine) < mine:
                wrong.append(f"{name} imports {imported}")
            if name in row_of and package == "cacheengine" and imported not in beside:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_is_listed_and_has_a_face(package: str) -> None:
    """A room is a folder, or a single module that is its own face."""
    folders = {each.parent.name for each in (ROOT / package).glob("*/__init__.py")}
    assert folders <= set(ROOMS[package])
    for room, may_import in ROOMS[package].items():
        told = ast.get_docstring(parsed(modules(package)[f"{package}.{room}"]))
        assert told is not None
        _, _, last = " ".join(told.split()).rpartition("Imports ")
        assert {each for each in may_import if each not in last} == set(), room


@pytest.mark.parametrize("package", ["router", "cacheengine", "bench"])
def test_no_folder_has_more_modules_than_one_takes_in(package: str) -> None:
    sizes = Counter(path.parent for path in modules(package).values() if path.stem != "__init__")
    assert {str(each): n for each, n in sizes.items() if n > LARGEST_ROOM_MODULES} == {}


@pytest.mark.parametrize("package", ["router", "cacheengine", "bench"])
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


def test_the_router_takes_only_keys_trust_and_wire_from_the_engine() -> None:
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


def test_only_agent_and_simulator_speak_http_and_only_the_connector_knows_vllm() -> None:
    wrong = []
    for name, path in modules("cacheengine").items():
        for imported in imports(path):
            top = imported.split(".")[0]
            if top == "aiohttp" and not name.startswith(SPEAK_HTTP):
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


@pytest.mark.parametrize("package", ["router", "cacheengine", "bench"])
def test_public_things_have_docstrings(package: str) -> None:
    missing = []
    for name, path in modules(package).items():
        tree = parsed(path)
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
        if lines > (300 if package in ROOMS else 400) and package != "tests":
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
