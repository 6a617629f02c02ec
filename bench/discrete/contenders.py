"""All that is compared in model time, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from bench.discrete.bounds import Oracle
from bench.discrete.ours import OurRouter, Settings
from bench.discrete.peers import RuleRouter
from bench.discrete.play import Contender, FleetOptions, Run, StoppableRouter, play_with
from bench.discrete.replica import ModelReplica
from bench.discrete.rules.catalogue import rules
from bench.workloads.session import Session
from router.config import AdmissionConfig, PrefetchConfig, SessionConfig

OURS: Final = "ours"
SHARED_CACHE: Final = "shared-infinite-cache"
ORACLE: Final = "oracle"


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


def _oracle(replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
    return Oracle(replicas)


_PLAIN: Final = Settings()

ABLATIONS: Final[Mapping[str, Settings]] = MappingProxyType(
    {
        "ours-without-prefetch": replace(
            _PLAIN, sections={"prefetch": PrefetchConfig(enabled=False)}
        ),
        "ours-without-early-prefetch": replace(
            _PLAIN, sections={"prefetch": PrefetchConfig(early=False)}
        ),
        "ours-with-rhythm": replace(_PLAIN, sections={"prefetch": PrefetchConfig(ahead=True)}),
        "ours-without-copies": replace(_PLAIN, copies=False),
        "ours-without-holding": replace(
            _PLAIN, sections={"admission": AdmissionConfig(enabled=False)}
        ),
        "ours-first-come": replace(_PLAIN, sections={"admission": AdmissionConfig(ageing=1e6)}),
        "ours-without-session-margin": replace(
            _PLAIN, sections={"sessions": SessionConfig(spill_margin_s=0.0)}
        ),
        "ours-true-rates": replace(_PLAIN, true_rates=True),
    }
)
"""Our router with one mechanism switched off, or another rate to start from."""

PEERS: Final = tuple(rules(1, 1, 1, 0))
"""Other routers' rules, by name."""

CONTENDERS: Final[Mapping[str, Contender]] = MappingProxyType(
    {OURS: _ours(_PLAIN)}
    | {name: _ours(settings) for name, settings in ABLATIONS.items()}
    | {name: Contender(make=partial(_by_rule, name)) for name in PEERS}
    | {
        ORACLE: Contender(make=_oracle, foresees=True),
        SHARED_CACHE: Contender(make=_oracle, foresees=True, shares_cache=True),
    }
)


def play(contender: str, sessions: Sequence[Session], options: FleetOptions) -> Run:
    """Play sessions through a contender, by its name; deterministic.

    Raises KeyError for a name that is none of `CONTENDERS`.
    """
    return play_with(CONTENDERS[contender], sessions, options)
