"""A fleet in discrete events: the router's own policy code against modelled replicas, no sockets.

`router.fleet.Fleet` and `router.admission.Gate` decide, as in the router; the
replicas here prefill one prompt after another at a given rate, keep what they
computed in three tiers (least recently used), and tell the router of every
change at once. Coarse on purpose (a chunk is a block, decoding costs nothing),
so that an hour of a thousand replicas takes minutes. Times are in seconds of
the model.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

from cacheengine.keys import HashScheme
from router.admission import Admitted, Gate
from router.config import (
    AdmissionConfig,
    IndexConfig,
    PolicyName,
    RatesConfig,
    ReplicaConfig,
    RouterConfig,
    SessionConfig,
)
from router.fleet import Fleet
from router.keyring import PromptKeyring
from router.policy import Decision
from router.promised import Promised
from router.replica import KeyShape, Tier
from router.ticket import Ticket

_DECODE_TOKEN_S = 0.03


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a modelled replica has and how fast it is."""

    block_tokens: int = 512
    gpu_tokens: int = 200_000
    cpu_tokens: int = 40_000
    disk_tokens: int = 4_000_000
    prefill_tokens_per_s: float = 8_000.0
    load_tokens_per_s: float = 160_000.0
    disk_tokens_per_s: float = 20_000.0
    peer_tokens_per_s: float = 24_000.0


@dataclass(eq=False, slots=True)
class ModelPrompt:
    """A prompt of numbered blocks: equal numbers, equal text up to there (`keyring.PromptView`)."""

    blocks: Sequence[int]
    token_count: int
    session: str | None = None
    output_tokens: int = 1
    token_ids: Sequence[int] = (0,)
    text: str = ""

    @property
    def affinity(self) -> bytes:
        """What equal prompts have in common: their first block."""
        return self.blocks[0].to_bytes(8, "big") if self.blocks else b""

    def lora(self, adapters: object) -> None:
        """Return None: there are no adapters here."""

    def chain(
        self, scheme: HashScheme, block_tokens: int, *, lora: tuple[str, str] | None = None
    ) -> list[bytes]:
        """Return the numbers of its blocks as keys."""
        return [number.to_bytes(8, "big") for number in self.blocks]

    def text_chain(self) -> list[int]:
        """Return nothing: the model's prompts have no text."""
        return []


class _Tier(OrderedDict[int, None]):
    """Blocks in the order of their use."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def use(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self:
                self.move_to_end(key)

    def put(self, keys: Iterable[int]) -> tuple[list[int], list[int]]:
        """Add keys; return those that are new, and those that had to go for them."""
        new, gone = [], []
        for key in keys:
            if key in self:
                self.move_to_end(key)
            else:
                self[key] = None
                new.append(key)
        while len(self) > self._capacity:
            gone.append(self.popitem(last=False)[0])
        return new, gone


@dataclass(eq=False, slots=True)
class _Running:
    prompt: ModelPrompt
    ticket: Ticket
    arrived_s: float
    sent_s: float
    predicted_s: float
    cached_tokens: int = 0
    there_s: dict[int, float] = field(default_factory=dict)
    """When blocks fetched for it are in CPU RAM; pinned there until it is computed."""


@dataclass(eq=False)
class _ModelReplica:
    slot: int
    tiers: dict[Tier, _Tier]
    waiting: list[_Running] = field(default_factory=list)
    running: _Running | None = None
    coming: dict[int, float] = field(default_factory=dict)
    """Blocks on their way into CPU RAM, and when they are there."""
    look_at_s: float = inf
    """When it will look whether what it waits for is there."""
    disk_free_s: float = 0.0
    peer_free_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    prompt_tokens: int
    cached_tokens: int
    held_s: float
    """In the router."""
    ttft_s: float
    predicted_s: float
    """What the decision that sent it said."""
    predicted_for_s: float
    """What that should have been: from sending it to its first token."""


class FleetModel:
    """Replicas, a router and a clock; `run` plays requests through them."""

    def __init__(
        self,
        replicas: int,
        machine: Machine,
        *,
        policy: PolicyName = "ttft",
        prefetch: bool = True,
        copies: bool = True,
        admission: AdmissionConfig | None = None,
        max_keys: int = 8_000_000,
        max_sessions: int = 100_000,
    ) -> None:
        self._machine = machine
        self._prefetch = prefetch
        self.fleet = Fleet(
            RouterConfig(
                replicas=tuple(
                    ReplicaConfig(url=f"http://r{slot}:1", instance_id=f"r{slot}", agent_url="x")
                    for slot in range(replicas)
                ),
                policy=policy,
                rates=RatesConfig(
                    prefill_tokens_per_s=machine.prefill_tokens_per_s,
                    cpu_load_bytes_per_s=machine.load_tokens_per_s,
                    disk_bytes_per_s=machine.disk_tokens_per_s,
                    peer_bytes_per_s=machine.peer_tokens_per_s,
                    kv_bytes_per_token=1.0,
                ),
                admission=admission or AdmissionConfig(),
                index=IndexConfig(max_keys=max_keys),
                sessions=SessionConfig(max_sessions=max_sessions),
            )
        )
        shape = KeyShape(scheme=HashScheme(), block_tokens=machine.block_tokens)
        for name, each in self.fleet.replicas.items():
            self.fleet.up(name)
            each.shape, each.has_events, each.incarnation = shape, True, "model"
            each.transfer_port = 1 if copies else None
        capacities = {
            Tier.GPU: machine.gpu_tokens,
            Tier.CPU: machine.cpu_tokens,
            Tier.DISK: machine.disk_tokens,
        }
        self._replicas = [
            _ModelReplica(
                slot,
                {tier: _Tier(size // machine.block_tokens) for tier, size in capacities.items()},
            )
            for slot in range(replicas)
        ]
        self._disk_s = machine.block_tokens / machine.disk_tokens_per_s
        self._peer_s = machine.block_tokens / machine.peer_tokens_per_s
        self._gate = Gate(self.fleet)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._pump_at_s = inf
        self._arrived: dict[int, tuple[ModelPrompt, float]] = {}
        self.now_s = 0.0
        self.answers: list[Answer] = []
        self.refused = 0
        self.copied_tokens = 0

    def run(self, arrivals: Iterable[tuple[float, ModelPrompt]]) -> list[Answer]:
        """Play requests (time of arrival, prompt) to their end; return the answers in order."""
        for at_s, prompt in arrivals:
            self._at(at_s, partial(self._arrive, prompt))
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        return self.answers

    # --- the router's side

    def _at(self, when_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happens))

    def _arrive(self, prompt: ModelPrompt) -> None:
        keyring = PromptKeyring(prompt)

        def place(now_s: float, promised: Promised) -> Decision:
            return self.fleet.place(
                keyring,
                model=None,
                session=prompt.session,
                promised=promised,
                now_s=now_s,
            )

        ended = self._gate.arrive(place, self.now_s)
        if isinstance(ended, Admitted):
            self._send(prompt, ended, self.now_s)
        else:
            self._arrived[id(ended)] = (prompt, self.now_s)
            self._plan_pump()

    def _plan_pump(self) -> None:
        when_s = self._gate.next_pump_s(self.now_s)
        if when_s < self._pump_at_s:
            self._pump_at_s = when_s
            self._at(when_s, self._pump_as_planned)

    def _pump_as_planned(self) -> None:
        # Not if it was done since then, and planned anew for later.
        if self.now_s >= self._pump_at_s:
            self._pump()

    def _pump(self) -> None:
        self._pump_at_s = inf
        for waiting, end in self._gate.pump(self.now_s):
            prompt, arrived_s = self._arrived.pop(id(waiting))
            if isinstance(end, Admitted):
                self._send(prompt, end, arrived_s)
            else:
                self.refused += 1
        self._plan_pump()

    def _send(self, prompt: ModelPrompt, admitted: Admitted, arrived_s: float) -> None:
        decision = admitted.decision
        replica = self._replicas[decision.plan.slot]
        if self._prefetch:
            self._fetch_from_disk(replica, map(_number, decision.prefetch_keys))
        if decision.copy is not None:
            source = self._replicas[self.fleet.replicas[decision.copy.source_id].slot]
            self._fetch_from_peer(replica, source, map(_number, decision.copy.keys))
        running = _Running(
            prompt, admitted.ticket, arrived_s, self.now_s, decision.predicted_ttft_s
        )
        replica.waiting.append(running)
        self._find(replica, running)
        self._begin(replica)

    # --- the replicas' side

    def _begin(self, replica: _ModelReplica) -> None:
        """Let an idle replica take the first that waits whose KV is there, as vLLM does.

        What lies on disk only is fetched from the moment that this is seen.
        """
        if replica.running is not None:
            return
        replica.look_at_s = inf if replica.look_at_s <= self.now_s else replica.look_at_s
        ready_s = inf
        for running in replica.waiting:
            on_gpu, its_ready_s, end = self._find(replica, running)
            if its_ready_s <= self.now_s:
                replica.waiting.remove(running)
                self._compute(replica, running, on_gpu, end)
                return
            ready_s = min(ready_s, its_ready_s)
        if ready_s < replica.look_at_s:
            replica.look_at_s = ready_s
            self._at(ready_s, partial(self._begin, replica))

    def _compute(self, replica: _ModelReplica, running: _Running, on_gpu: int, end: int) -> None:
        replica.running = running
        prompt, machine = running.prompt, self._machine
        cached = min(end * machine.block_tokens, prompt.token_count - 1)
        running.cached_tokens = cached
        loaded = max(0, cached - on_gpu * machine.block_tokens)
        busy_s = loaded / machine.load_tokens_per_s
        busy_s += (prompt.token_count - cached) / machine.prefill_tokens_per_s
        for tier in replica.tiers.values():
            tier.use(prompt.blocks[:end])
        self._at(self.now_s + busy_s, partial(self._first_token, replica))

    def _find(self, replica: _ModelReplica, running: _Running) -> tuple[int, float, int]:
        """Return how many blocks are on the GPU, when those behind are there, and their end."""
        blocks = running.prompt.blocks
        gpu, cpu, disk = (replica.tiers[tier] for tier in (Tier.GPU, Tier.CPU, Tier.DISK))
        end = on_gpu = next((at for at, key in enumerate(blocks) if key not in gpu), len(blocks))
        ready_s = self.now_s
        for key in blocks[on_gpu:]:
            if key not in running.there_s and key not in cpu:
                if key not in replica.coming:
                    if key not in disk:
                        break
                    self._fetch_from_disk(replica, (key,))
                running.there_s[key] = replica.coming[key]
            ready_s = max(ready_s, running.there_s.get(key, ready_s))
            end += 1
        return on_gpu, ready_s, end

    def _first_token(self, replica: _ModelReplica) -> None:
        running = replica.running
        assert running is not None
        replica.running = None
        prompt = running.prompt
        for tier in replica.tiers:
            self._hold(replica, tier, prompt.blocks)
        running.ticket.first_byte(self.now_s)
        self.answers.append(
            Answer(
                prompt_tokens=prompt.token_count,
                cached_tokens=running.cached_tokens,
                held_s=running.sent_s - running.arrived_s,
                ttft_s=self.now_s - running.arrived_s,
                predicted_s=running.predicted_s,
                predicted_for_s=self.now_s - running.sent_s,
            )
        )
        decoded_s = self.now_s + prompt.output_tokens * _DECODE_TOKEN_S
        self._at(decoded_s, partial(self._finish, running))
        self._begin(replica)
        self._pump()

    def _finish(self, running: _Running) -> None:
        running.ticket.finish(self.now_s, ok=True, cached_tokens=running.cached_tokens)

    def _hold(self, replica: _ModelReplica, tier: Tier, keys: Iterable[int]) -> None:
        new, gone = replica.tiers[tier].put(keys)
        self.fleet.index.add(replica.slot, tier, new)
        self.fleet.index.remove(replica.slot, tier, gone)

    # --- KV on its way to CPU RAM

    def _fetch_from_disk(self, replica: _ModelReplica, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in replica.tiers[Tier.CPU] and key not in replica.coming:
                replica.disk_free_s = max(replica.disk_free_s, self.now_s) + self._disk_s
                self._come(replica, key, replica.disk_free_s)

    def _fetch_from_peer(
        self, replica: _ModelReplica, source: _ModelReplica, keys: Iterable[int]
    ) -> None:
        for key in keys:
            if key in replica.coming:
                continue
            there_s = self.now_s
            if key not in source.tiers[Tier.CPU]:
                source.disk_free_s = max(source.disk_free_s, self.now_s) + self._disk_s
                there_s = source.disk_free_s
            replica.peer_free_s = max(replica.peer_free_s, there_s) + self._peer_s
            self.copied_tokens += self._machine.block_tokens
            self._come(replica, key, replica.peer_free_s)

    def _come(self, replica: _ModelReplica, key: int, when_s: float) -> None:
        def arrive() -> None:
            if replica.coming.pop(key, None) is not None:
                self._hold(replica, Tier.CPU, (key,))

        replica.coming[key] = when_s
        self._at(when_s, arrive)


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")
