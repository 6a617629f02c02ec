"""Which replicas of a fleet may answer a request."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from router.config import BreakerConfig
from router.fleet.policy import salt_of
from router.fleet.replica import Replica, Replicas, State
from router.index import KeyShape, slots
from router.latency import ReplicaQueue
from warmroute_common.api_errors import NoReplicaError, UnknownModelError

_MAX_VIEWS: Final = 64
"""Names of models are the clients': where no replica has told its own, any may come."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Replicas that make the keys of one prompt alike."""

    shape: KeyShape | None
    adapters: Mapping[str, str]
    replicas: int
    """The bits of their slots."""


@dataclass(frozen=True, slots=True)
class Eligible:
    """The replicas that may get a request, in the order of the configuration."""

    replicas: Sequence[Replica]
    by_slot: Mapping[int, Replica]
    sources: Mapping[int, Replica]
    """By slot the replicas that may give their KV: these, and the draining ones."""
    kinds: Sequence[Kind]
    """Of the peer sources."""
    kind_at: Mapping[int, int]
    """By a source's slot the index of its kind."""
    queues: Sequence[ReplicaQueue]
    """Those of the ``replicas``, in the same order."""
    ring: Sequence[tuple[int, int]]
    """A hash of each one's id, and its place in the order, sorted."""

    def __len__(self) -> int:
        return len(self.replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas)

    @classmethod
    def of(cls, replicas: Sequence[Replica], draining: Sequence[Replica]) -> "Eligible":
        """Return a view of these replicas as they are now."""
        sources = [*replicas, *draining]
        kinds = _kinds(sources)
        return cls(
            replicas=replicas,
            by_slot={each.slot: each for each in replicas},
            sources={each.slot: each for each in sources},
            kinds=kinds,
            kind_at={slot: at for at, kind in enumerate(kinds) for slot in slots(kind.replicas)},
            queues=[each.queue for each in replicas],
            ring=sorted((salt_of(each.id), at) for at, each in enumerate(replicas)),
        )


class Roster:
    """Keeps for each model the replicas that may answer.

    `changed` must follow each change of a replica: of its state, models, shape or id. Breakers
    are changed here alone.
    """

    def __init__(
        self,
        replicas: Replicas,
        aliases: Mapping[str, str],
        breaker: BreakerConfig,
        jitter: Callable[[], float],
    ) -> None:
        """``jitter`` returns random numbers from 0 to 1."""
        self._replicas = replicas
        self._breaker = breaker
        self._jitter = jitter
        self._due_s = inf
        """When time changes a breaker next."""
        self.aliases = aliases
        """By further names that clients may use, the names of models."""
        self._views: dict[str | None, Eligible] = {}
        self.version = 0
        """Another after each change."""

    def models(self) -> set[str]:
        """Return the names of the models that replicas are known to serve, and their aliases."""
        names = set[str]().union(*(each.models or () for each in self._replicas.values()))
        return names | {alias for alias, real in self.aliases.items() if real in names}

    def changed(self) -> None:
        """Forget the replicas that may answer: they are found anew when next asked for."""
        self._views.clear()
        self.version += 1

    def pass_time(self, now_s: float) -> None:
        """Let trials through where the time of a breaker is over."""
        if now_s >= self._due_s:
            for each in self._replicas.values():
                each.breaker.pass_time(now_s)
            self._breakers_changed()

    def begin(self, replica: Replica, now_s: float) -> int:
        """Note that a replica gets a request; return its number as a trial, 0 if it is none."""
        if trial := replica.breaker.begin(now_s):
            self._breakers_changed()
        return trial

    def end_trial(self, replica: Replica, trial: int) -> None:
        """Note that a trial is over, perhaps without a verdict."""
        if replica.breaker.end_trial(trial):
            self._breakers_changed()

    def note_result(self, replica: Replica, now_s: float, *, ok: bool, trial: int) -> bool:
        """Note what became of a request; return whether that opened or closed the breaker."""
        changed = replica.breaker.note(
            ok, now_s, self._breaker, trial=trial, jitter=0.0 if ok else self._jitter()
        )
        if changed:
            self._breakers_changed()
        return changed

    def came_back(self, replica: Replica) -> None:
        """Note that a replica was down and is up again."""
        if replica.breaker.came_back():
            self._breakers_changed()

    def _breakers_changed(self) -> None:
        self._due_s = min((each.breaker.due_s for each in self._replicas.values()), default=inf)
        self.changed()

    def eligible(
        self,
        model: str | None,
        exclude: Collection[str],
        bound_to: str | None,
        among: Collection[str] | None,
    ) -> Eligible:
        """Return the replicas that may answer; raise `UnknownModelError` or `NoReplicaError` for none."""
        if exclude or bound_to is not None or among is not None:
            return self._find(model, exclude, bound_to, among)
        view = self._views.get(model)
        if view is None:
            view = self._find(model, (), None, None)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[model] = view
        return view

    def _find(
        self,
        model: str | None,
        exclude: Collection[str],
        bound_to: str | None,
        among: Collection[str] | None,
    ) -> Eligible:
        serving = [each for each in self._replicas.values() if each.serves(model)]
        if not self._replicas:
            raise NoReplicaError("the router knows no replica yet, or all have left")
        if not serving:
            raise UnknownModelError(model, self.models())
        # By replica, not by id: one may have got its name since it was tried.
        tried = [self._replicas.find(each) for each in exclude]
        left = [each for each in serving if each not in tried]
        if bound_to is not None:
            bound = self._replicas.find(bound_to)
            left = [each for each in left if each is bound]
        if among is not None:
            named = [self._replicas.find(each) for each in among]
            left = [each for each in left if each in named]
        for state in (State.UP, State.UNKNOWN):
            if in_state := [each for each in left if each.state is state]:
                eligible = [each for each in in_state if not each.is_held_off] or in_state
                draining = [each for each in left if each.is_leaving]
                return Eligible.of(eligible, draining)
        raise NoReplicaError(_why_none(serving, tried, bound_to))


def _kinds(replicas: Sequence[Replica]) -> list[Kind]:
    kinds: dict[tuple[KeyShape | None, tuple[tuple[str, str], ...]], Kind] = {}
    for each in replicas:
        name = (each.key_shape, tuple(sorted(each.adapters.items())))
        bits = kinds[name].replicas if name in kinds else 0
        kinds[name] = Kind(each.key_shape, each.adapters, bits | 1 << each.slot)
    return list(kinds.values())


def _why_none(
    serving: Sequence[Replica], tried: Sequence[Replica | None], bound_to: str | None
) -> str:
    states = ", ".join(
        f"{each.id} {'was tried' if each in tried else each.state}" for each in serving
    )
    if bound_to is not None:
        return f"only '{bound_to}' has what this request goes on from, and it is not up ({states})"
    return f"no replica can take the request ({states})"
