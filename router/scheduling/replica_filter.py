"""Which replicas of a fleet may answer a request."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from router.fleet.replica_queue import ReplicaQueue
from router.index.holders import slots
from router.index.prompt_keys import KeyShape
from router.scheduling.picker import salt_of
from warmroute_common.api_errors import NoReplicaError, UnknownModelError

_MAX_VIEWS: Final = 64
"""Models with a kept view: clients choose the names if replicas do not report theirs."""


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Replicas that make equal keys of one prompt."""

    shape: KeyShape | None
    adapters: Mapping[str, str]
    replicas: int
    """The bits of their slots."""


@dataclass(frozen=True, slots=True)
class EligibleReplicas:
    """The replicas that may get a request, in the order of the configuration."""

    replicas: Sequence[Replica]
    by_slot: Mapping[int, Replica]
    sources: Mapping[int, Replica]
    """By slot, the replicas that may give their KV: these and the draining ones."""
    groups: Sequence[KeyGroup]
    """The groups of the peer sources."""
    group_at: Mapping[int, int]
    """By a source's slot, the index of its group."""
    queues: Sequence[ReplicaQueue]
    """The queues of the ``replicas``, in the same order."""
    ring: Sequence[tuple[int, int]]
    """The hash of each one's id and its position in the order, sorted."""

    def __len__(self) -> int:
        return len(self.replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas)

    @classmethod
    def of(cls, replicas: Sequence[Replica], draining: Sequence[Replica]) -> "EligibleReplicas":
        """Return a view of these replicas as they are now."""
        sources = [*replicas, *draining]
        groups = _key_groups(sources)
        return cls(
            replicas=replicas,
            by_slot={each.slot: each for each in replicas},
            sources={each.slot: each for each in sources},
            groups=groups,
            group_at={
                slot: at for at, group in enumerate(groups) for slot in slots(group.replicas)
            },
            queues=[each.queue for each in replicas],
            ring=sorted((salt_of(each.id), at) for at, each in enumerate(replicas)),
        )


class ReplicaFilter:
    """Finds the replicas that may answer, and keeps them per model until the fleet changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._views: dict[str | None, EligibleReplicas] = {}
        self._version = fleet.replicas.version
        """`Replicas.version` that the views belong to."""

    def eligible(
        self,
        model: str | None,
        exclude: Collection[str],
        bound_to: str | None,
        among: Collection[str] | None,
    ) -> EligibleReplicas:
        """Return the replicas that may answer.

        Raises `UnknownModelError` or `NoReplicaError` if there is none.
        """
        if exclude or bound_to is not None or among is not None:
            return self._find(model, exclude, bound_to, among)
        if self._version != self._fleet.replicas.version:
            self._version = self._fleet.replicas.version
            self._views.clear()
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
    ) -> EligibleReplicas:
        replicas = self._fleet.replicas
        if not replicas:
            raise NoReplicaError(
                "no replicas are registered; check 'replicas' and 'discovery' in the router's "
                "configuration"
            )
        serving = [each for each in replicas.values() if each.serves(model)]
        if not serving:
            raise UnknownModelError(model, self._fleet.models())
        # By replica, not by id: a replica may have been renamed since it was tried.
        tried = [replicas.find(each) for each in exclude]
        left = [each for each in serving if each not in tried]
        if bound_to is not None:
            bound = replicas.find(bound_to)
            left = [each for each in left if each is bound]
        if among is not None:
            named = [replicas.find(each) for each in among]
            left = [each for each in left if each in named]
        for state in (ReplicaState.UP, ReplicaState.UNKNOWN):
            if in_state := [each for each in left if each.state is state]:
                eligible = [each for each in in_state if not each.is_held_off] or in_state
                draining = [each for each in left if each.is_leaving]
                return EligibleReplicas.of(eligible, draining)
        raise NoReplicaError(_why_none(serving, tried, bound_to))


def _key_groups(replicas: Sequence[Replica]) -> list[KeyGroup]:
    groups: dict[tuple[KeyShape | None, tuple[tuple[str, str], ...]], KeyGroup] = {}
    for each in replicas:
        name = (each.key_shape, tuple(sorted(each.adapters.items())))
        bits = groups[name].replicas if name in groups else 0
        groups[name] = KeyGroup(each.key_shape, each.adapters, bits | 1 << each.slot)
    return list(groups.values())


def _why_none(
    serving: Sequence[Replica], tried: Sequence[Replica | None], bound_to: str | None
) -> str:
    states = ", ".join(
        f"{each.id} {'was tried' if each in tried else each.state}" for each in serving
    )
    if bound_to is not None:
        return f"the previous response is kept by '{bound_to}', which is not up ({states})"
    return f"no replica can take the request ({states})"
