"""Fleets for tests of scheduling, and a driver of the admission queue."""

from dataclasses import dataclass, field
from typing import Any

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import (
    AdmissionConfig,
    PolicyName,
    PrefetchConfig,
    RatesConfig,
    ReplicaConfig,
    RouterConfig,
)
from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.index.prompt_keys import PromptKeyCache
from router.priority import Priority
from router.scheduling.admission import AdmissionQueue, Admitted
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.scheduling.scorer import ReservedWork
from router.scheduling.waiting_queue import WaitingRequest
from tests.router.fleet.helpers import info
from tests.router.prompt.prompts_given import GivenPrompt, tokens
from warmroute_common.agent_protocol import InstanceInfo, TierInfo


def make_copying_fleet(
    count: int,
    *,
    policy: PolicyName = "ttft",
    prefetch: bool = True,
    weights: CostWeights = DEFAULT_WEIGHTS,
    **changes: Any,
) -> Fleet:
    """Return a fleet of replicas that can exchange chunks, 1,000 tokens and 1 MB a second each."""
    fleet = Fleet(
        RouterConfig(
            policy=policy,
            prefetch=PrefetchConfig(enabled=prefetch),
            replicas=tuple(
                ReplicaConfig(url=f"http://h:{8000 + at}", instance_id=f"r{at}", agent_url="x")
                for at in range(count)
            ),
            rates=RatesConfig(
                prefill_tokens_per_s=1000.0,
                kv_bytes_per_token=1000.0,
                disk_bytes_per_s=1e8,
                peer_bytes_per_s=1e8,
            ),
        ),
        weights,
    )
    for name in list(fleet.replicas):
        fleet.up(name)
        fleet.apply_info(name, peer_info(name, **changes))
        fleet.following_kv(name)
    return fleet


def peer_info(name: str, **changes: Any) -> InstanceInfo:
    tiers = {"disk": TierInfo(capacity_bytes=1, used_bytes=0)}
    return info(name, **({"transfer_port": 1, "layout": "l", "tiers": tiers} | changes))


def make_learned_fleet(
    count: int = 1, *, policy: PolicyName = "ttft", is_probed: bool = True, **admission: Any
) -> Fleet:
    replicas = tuple(
        ReplicaConfig(url=f"http://host:{8000 + number}", instance_id=f"r{number}")
        for number in range(count)
    )
    fleet = Fleet(
        RouterConfig(
            replicas=replicas,
            policy=policy,
            rates=RatesConfig(prefill_tokens_per_s=1000.0, kv_bytes_per_token=1000.0),
            # Half a second ahead: so that prompts of a few seconds show what is held.
            admission=AdmissionConfig(**({"dispatch_ahead_s": 0.5} | admission)),
        )
    )
    for each in fleet.replicas.values() if is_probed else ():
        fleet.up(each.id)
    return fleet


class CountingScheduler(RequestScheduler):
    """Counts how often requests are placed."""

    placings = 0

    def place(
        self, request: PlacementRequest, now_s: float, reserved: ReservedWork | None = None
    ) -> Decision:
        self.placings += 1
        return super().place(request, now_s, reserved)


@dataclass
class Driver:
    """Requests to an admission queue, by name, and what became of them."""

    fleet: Fleet
    scheduler: "CountingScheduler" = field(init=False)
    queue: AdmissionQueue = field(init=False)
    admitted: dict[str, Admitted] = field(default_factory=dict)
    waiting: dict[str, WaitingRequest] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = CountingScheduler(self.fleet)
        self.queue = AdmissionQueue(self.scheduler)

    def ask(
        self,
        name: str,
        prompt: GivenPrompt | float,
        now_s: float = 0.0,
        *,
        at_once: bool = False,
        session: str | None = None,
        max_wait_s: float = float("inf"),
        model: str | None = None,
        client: str | None = None,
        streamed: bool = True,
        priority: Priority = Priority.NORMAL,
    ) -> bool:
        """Let a request arrive; return whether it is admitted.

        A number is the length of a prompt in seconds; the prompt shares nothing with others.
        """
        if not isinstance(prompt, GivenPrompt):
            start = 10**9 * (1 + len(self.admitted) + len(self.waiting))
            prompt = tokens(round(prompt * 1000), start=start)

        request = PlacementRequest(
            keys=PromptKeyCache(prompt),
            model=model,
            session=session,
            client=client,
            streamed=streamed,
            priority=priority,
        )
        end = self.queue.arrive(request, now_s, at_once=at_once, max_wait_s=max_wait_s)
        if isinstance(end, Admitted):
            self.admitted[name] = end
            return True
        self.waiting[name] = end
        return False

    def dispatch(self, now_s: float) -> str:
        """Return the names of the requests that are admitted, in order."""
        went = []
        for waiting, end in self.queue.dispatch(now_s):
            (name,) = [key for key, each in self.waiting.items() if each is waiting]
            del self.waiting[name]
            if isinstance(end, Admitted):
                self.admitted[name] = end
                went.append(name)
            else:
                self.refused[name] = end
        return "".join(went)

    def answer(self, name: str, now_s: float) -> None:
        """Let the first token of a request that went come."""
        self.admitted[name].ticket.first_byte(now_s)

    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.fleet.replicas.values())
