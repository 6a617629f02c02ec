"""The published comparison: made, told and checked by command.

    python -m bench.proof make --agents agentic_code_150.jsonl --conversation trace.jsonl
    python -m bench.proof make --only workloads 'regimes-agents-*' --agents agentic_code_150.jsonl
    python -m bench.proof list
    python -m bench.proof try headline-agents-ram1-load0.8 --requests 300 --seeds 1 --first-seed 1
    python -m bench.proof show headline-agents-ram1-load0.8
    python -m bench.proof readme
    python -m bench.proof check
    python -m bench.proof costliest headline-agents-ram1-load0.8 --against vllm-kv-aware

``make`` needs a clean commit, keeps each case in a file of its own, leaves those alone that
are there for the same sources, goes on where it was stopped, and removes results of cases that no
longer exist. ``try`` runs a case, small
if wanted, on the tree as it is, and keeps nothing; without a trace it is generated.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.command import positive
from bench.proof import tables
from bench.proof.bars import bars
from bench.proof.case import DECODE_RATES, Case
from bench.proof.cases import SIZES, TRACED, all_cases, chosen
from bench.proof.compare import P90, best_peer
from bench.proof.make import Maker, definitions, tried
from bench.proof.results import Definition, Result, Store
from bench.proof.show import costliest_table, lost, show, summary
from bench.proof.tables import PAGES, part_from, rewritten
from bench.proof.tree import RESULTS, Tree
from bench.ttft import BenchError

ROOT: Final = Path(__file__).resolve().parents[2]
_PLAY_S: Final = 10.0
"""Mean time of a play on a core of an AMD EPYC, from 34 runs and the simulated time of all."""


def _say(text: str) -> None:
    print(text, flush=True)


def _cases() -> list[Case]:
    # The driver takes its time to import, and what only reads results does without.
    from bench.proof.wired import contenders  # noqa: PLC0415

    return all_cases(contenders())


def _traces(arguments: argparse.Namespace) -> dict[str, Path]:
    given = {workload: getattr(arguments, workload) for workload in TRACED}
    return {workload: path for workload, path in given.items() if path is not None}


def _make(arguments: argparse.Namespace) -> int:
    from bench.proof.wired import bench  # noqa: PLC0415

    store, cases = Store(arguments.results), _cases()
    for name in store.remove_others(each.name for each in cases):
        _say(f"removed: there is no case {name} any more")
    maker = Maker(
        tree=Tree(ROOT),
        store=store,
        bench=bench(_traces(arguments)),
        jobs=arguments.jobs,
        say=_say,
    )
    failures = maker.make(chosen(cases, arguments.only))
    for each in failures:
        print(f"bench.proof: {each}", file=sys.stderr)
    return 1 if failures else 0


def _try(arguments: argparse.Namespace) -> int:
    from bench.proof.wired import bench  # noqa: PLC0415

    for each in chosen(_cases(), [arguments.case]):
        (definition,) = definitions([_smaller(each, arguments)], "", _traces(arguments))
        made = tried(definition, bench(_traces(arguments)), jobs=arguments.jobs, say=_say)
        _say(show(made))
    return 0


def _smaller(case: Case, arguments: argparse.Namespace) -> Case:
    first, count = arguments.first_seed or case.seeds[0], arguments.seeds or len(case.seeds)
    return replace(
        case,
        requests=arguments.requests or case.requests,
        seeds=tuple(range(first, first + count)),
        contenders=tuple(arguments.contender or case.contenders),
        decode=arguments.decode or case.decode,
        bound_s=arguments.ttft_bound or case.bound_s,
        tpot_bound_s=arguments.tpot_bound or case.tpot_bound_s,
    )


def _list(arguments: argparse.Namespace) -> int:
    store, cases = Store(arguments.results), chosen(_cases(), arguments.only)
    sources = Tree(ROOT).sources()
    lines = []
    for each in cases:
        made = store.find(each.name)
        amount = [str(each.plays), f"{each.requests:,}"]
        lines.append([each.name, *amount, _state(each, made, sources)])
    _say(tables.plain(["case", "plays", "requests each", "result"], lines))
    lines = []
    for name in (*dict.fromkeys(each.set for each in cases), "all"):
        some = [each for each in cases if name in (each.set, "all")]
        plays = sum(each.plays for each in some)
        lines.append([name, str(len(some)), f"{plays:,}", f"{plays * _PLAY_S / 60:.0f}"])
    _say("\n" + tables.plain(["set", "cases", "plays", "minutes of a core, estimated"], lines))
    return 0


def _state(case: Case, made: Result | None, sources: str) -> str:
    if made is None:
        return "missing"
    current = Definition(case=case, sources=sources, traces=made.traces).digest
    state = "made" if made.definition == current else "of another definition or other sources"
    return f"{state}, {made.machine['commit']}, {made.machine['time']}"


def _results(store: Store) -> list[Result]:
    return [store.read(name) for name in store.names()]


def _readme(arguments: argparse.Namespace) -> int:
    # matplotlib takes its time, and only plots need it.
    from bench.proof.plots import write_plots  # noqa: PLC0415

    store = Store(arguments.results)
    results = _results(store)
    for page in arguments.page:
        before = page.read_text(encoding="utf-8")
        shown = os.path.relpath(store.directory.resolve(), page.resolve().parent)
        after = rewritten(before, part_from(results, Path(shown).as_posix()))
        page.write_text(after, encoding="utf-8")
        _say(f"{page} {'is as it was' if after == before else 'rewritten'}")
    for path in write_plots(store.directory, results, store.records):
        _say(f"written to {path}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    found = bars(_results(Store(arguments.results)))
    lines = [[each.what, each.state, each.found] for each in found]
    for line in lines:
        _say(f"{line[1]:<8} {line[0]}: {line[2]}")
    met = sum(each.state == "met" for each in found)
    _say(f"{met} of {len(found)} bars are met")
    return 0 if met == len(found) else 1


def _show(arguments: argparse.Namespace) -> int:
    store = Store(arguments.results)
    cases = [name for name in store.names() if name.startswith(arguments.case)]
    for name in cases or [arguments.case]:
        _say(show(store.read(name)) + "\n")
    return 0


def _costliest(arguments: argparse.Namespace) -> int:
    store = Store(arguments.results)
    made = store.read(arguments.case)
    kept = {each.contender: each for each in store.records(made)}
    other = arguments.against or best_peer(made, P90)
    for name in ("ours", other):
        if name not in kept:
            raise BenchError(
                f"{arguments.case} keeps no records of {name}, only of: {', '.join(kept) or '-'}"
            )
    found = lost(kept["ours"], kept[str(other)])
    _say(f"{made.case.name}, seed {kept['ours'].seed}: ours against {other}")
    _say(summary(found, arguments.count))
    _say(costliest_table(found[: arguments.count], str(other)))
    return 0


_COMMANDS: Final[Mapping[str, tuple[Callable[[argparse.Namespace], int], str]]] = {
    "make": (_make, "make the results that are missing"),
    "list": (_list, "list the cases, and which are made"),
    "try": (_try, "run a case on the tree as it is, and keep nothing"),
    "show": (_show, "show what a case's result says"),
    "readme": (
        _readme,
        "rewrite the marked parts of README.md, docs/ and bench/results/README.md, and the plots",
    ),
    "check": (_check, "say which bars are met; exit code 0: all"),
    "costliest": (_costliest, "show the requests on which ours lost most"),
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {name: commands.add_parser(name, help=text) for name, (_, text) in _COMMANDS.items()}
    for each in made.values():
        each.add_argument(
            "--results", type=Path, default=ROOT / RESULTS / "proof", help="default: %(default)s"
        )
    for name in ("make", "list"):
        made[name].add_argument(
            "--only",
            nargs="+",
            default=[],
            metavar="SET|CASE",
            help=f"sets ({', '.join(SIZES)}) and cases, also as patterns; default: all",
        )
    for name in ("make", "try"):
        for workload in TRACED:
            made[name].add_argument(f"--{workload}", type=Path, metavar="FILE", help="its trace")
        made[name].add_argument(
            "--jobs", type=positive, default=os.cpu_count() or 1, help="default: %(default)s"
        )
    for name in ("try", "show", "costliest"):
        made[name].add_argument("case", metavar="CASE")
    made["try"].add_argument("--requests", type=positive, metavar="N", help="fewer of them")
    made["try"].add_argument("--seeds", type=positive, metavar="N", help="how many")
    made["try"].add_argument(
        "--first-seed", type=positive, metavar="N", help="to tune on: below those of the results"
    )
    made["try"].add_argument("--contender", nargs="+", metavar="NAME", help="only these")
    made["try"].add_argument("--decode", choices=DECODE_RATES, help="what a decode costs")
    made["try"].add_argument("--ttft-bound", type=float, metavar="S", help="of goodput")
    made["try"].add_argument("--tpot-bound", type=float, metavar="S", help="of goodput")
    made["readme"].add_argument(
        "--page", type=Path, nargs="+", default=[ROOT / page for page in PAGES]
    )
    made["costliest"].add_argument("--against", metavar="NAME", help="default: the best peer")
    made["costliest"].add_argument("--count", type=positive, default=20, metavar="N")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what a command says; return the exit code."""
    arguments = _arguments(argv)
    try:
        return _COMMANDS[arguments.command][0](arguments)
    except BenchError as error:
        print(f"bench.proof: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench.proof: stopped; make goes on where it was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
