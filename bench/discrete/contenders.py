"""All that is compared in model time, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from bench.discrete.bounds import ForesightRouter
from bench.discrete.play import Contender, FleetOptions, Run, StoppableRouter, play_with
from bench.discrete.rule_router import RuleRouter
from bench.discrete.rules.catalogue import rules, splits
from bench.workloads.ideal import NO_QUEUE, no_queue
from bench.workloads.session import Session
from replay.our_router import OurRouter, Settings
from replay.replica import ModelReplica
from router.config.cost_weights import DEFAULT_WEIGHTS
from router.config.settings import AdmissionConfig, PrefetchConfig

OURS: Final = "ours"
SHARED_CACHE: Final = "shared-infinite-cache"


def _ours(settings: Settings) -> Contender:
    return Contender(make=lambda replicas, seed: OurRouter(replicas, settings))


def _by_rule(name: str, replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
    machine = replicas[0].machine
    known = rules(
        len(replicas),
        machine.shape.block_tokens,
        machine.shape.gpu_blocks,
        seed,
        prefill_tokens_per_s=machine.rates.prefill_tokens_per_s,
    )
    return RuleRouter(replicas, known[name]())


def _by_split(name: str, replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
    machine = replicas[0].machine
    known = splits(
        len(replicas),
        machine.shape.block_tokens,
        seed,
        prefill_tokens_per_s=machine.rates.prefill_tokens_per_s,
    )
    return RuleRouter(replicas, known[name]())


def _foreseeing(replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
    return ForesightRouter(replicas)


_PLAIN: Final = Settings()


def _section(**sections: object) -> Settings:
    return Settings(sections=sections)


def _weighing(**changes: Any) -> Settings:
    return Settings(weights=replace(DEFAULT_WEIGHTS, **changes))


ABLATIONS: Final[Mapping[str, Settings]] = MappingProxyType(
    {
        "ours-without-prefetch": _section(prefetch=PrefetchConfig(enabled=False)),
        "ours-without-copies": Settings(copies=False),
        "ours-without-busy-weight": _weighing(most_behind=0.0),
        "ours-without-load-in-busy-weight": _weighing(most_behind=1.0),
        "ours-without-nearness": _weighing(near_s=0.0),
        "ours-without-holding": _section(admission=AdmissionConfig(enabled=False)),
        "ours-without-shortest-first": _section(admission=AdmissionConfig(ageing=1e6)),
        "ours-without-measuring": Settings(measures=False),
        "ours-with-true-rates": Settings(true_rates=True),
    }
)
"""Our router with one mechanism switched off, or with one that is off by default.

Without prefetch nothing is copied either: both are one section of the configuration.
"""

ANSWERS: Final[Mapping[str, Settings]] = MappingProxyType(
    {
        "ours-without-answer-seconds": _section(first_token_weight=1e9),
        "ours-with-remote-prefill": Settings(splits=True),
    }
)
"""Our router without the seconds after the first token in its score, and with remote prefills."""

SPLITS: Final = tuple(splits(8, 1, 0, prefill_tokens_per_s=1.0))
"""Fixed splits of eight replicas, by name."""

PEERS: Final = tuple(rules(1, 1, 1, 0))
"""Other routers' rules, by name."""

CONTENDERS: Final[Mapping[str, Contender]] = MappingProxyType(
    {OURS: _ours(_PLAIN)}
    | {name: _ours(settings) for name, settings in ABLATIONS.items()}
    | {name: _ours(settings) for name, settings in ANSWERS.items()}
    | {name: Contender(make=partial(_by_rule, name)) for name in PEERS}
    | {name: Contender(make=partial(_by_split, name)) for name in SPLITS}
    | {SHARED_CACHE: Contender(make=_foreseeing, shares_cache=True)}
)


NAMES: Final = (*CONTENDERS, NO_QUEUE)
"""All that `play` plays."""


def play(contender: str, sessions: Sequence[Session], options: FleetOptions) -> Run:
    """Play sessions through a contender, by its name; deterministic.

    Raises KeyError for a name that is none of `NAMES`.
    """
    if contender == NO_QUEUE:
        machine = options.machine
        return Run(records=no_queue(sessions, machine.rates, machine.shape), counts={})
    return play_with(CONTENDERS[contender], sessions, options)
