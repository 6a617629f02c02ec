"""Warmroute's own router in simulated time: the fleet, the admission and the staging.

Only what they reach by sockets is modelled: agents (`replay.staging`), event streams
(replicas notify their listeners) and the answers. Reading a prompt takes no time.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cacheengine.record import BandwidthMeter
from replay.replica import AnswerCutError, ModelReplica, ReplicaDownError
from replay.requests import Sent
from replay.staging import KV_BYTES_PER_TOKEN, ModelAgent, Network
from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import RatesConfig, ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.index.kv_events import BlocksRemoved, BlocksStored, GpuCleared, KvBatch, KvEvent
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.priority import Priority
from router.scheduling.admission import AdmissionController, AdmissionQueue
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.staging.stager import Stager
from simulator.model.replica_machine import Machine
from simulator.model.sim_request import SimRequest
from warmroute_common.agent_protocol import InstanceInfo, TierInfo
from warmroute_common.api_errors import NoReplicaError, RateLimitedError
from warmroute_common.keys import HashScheme

PROBE_S: Final = 2.0
"""Between two probes of a replica, as our router's default has it; the same for all."""


class Health:
    """Watches replicas; ``changed`` hears of each that goes down or comes up again."""

    def __init__(
        self,
        replicas: Sequence[ModelReplica],
        changed: Callable[[ModelReplica, bool], None],
    ) -> None:
        self._replicas = replicas
        self._changed = changed
        self._up = {each.slot for each in replicas}

    @property
    def healthy(self) -> list[int]:
        """The slots of replicas that are taken for healthy, in order."""
        return sorted(self._up)

    def suspect(self, replica: ModelReplica) -> None:
        """A try has failed there: look at it now."""
        self._probe(replica)

    async def watch(self) -> None:
        """Probe for ever."""
        while True:
            await asyncio.sleep(PROBE_S)
            for each in self._replicas:
                self._probe(each)

    def _probe(self, replica: ModelReplica) -> None:
        was_up = replica.slot in self._up
        if replica.is_alive == was_up:
            return
        if replica.is_alive:
            self._up.add(replica.slot)
        else:
            self._up.discard(replica.slot)
        self._changed(replica, replica.is_alive)


_TICK_S: Final = 1.0
_INFO_EVERY_S: Final = 30.0
"""As `router.feeds` asks a replica's agent for its identity and the recent speed of its disk."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How our router is set up: what an ablation changes."""

    sections: dict[str, Any] = field(default_factory=dict)
    """Sections of the router's configuration, without its replicas."""
    true_rates: bool = False
    """Start from the machine's rates, where others start from the defaults."""
    measures: bool = True
    """Whether replicas report what they measured."""
    copies: bool = True
    splits: bool = False
    """Whether replicas may prefill for each other."""
    weights: CostWeights = DEFAULT_WEIGHTS


def _true_rates(machine: Machine) -> RatesConfig:
    rates = machine.rates
    return RatesConfig(
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        cpu_load_bytes_per_s=rates.load_tokens_per_s * KV_BYTES_PER_TOKEN,
        disk_bytes_per_s=rates.disk_tokens_per_s * KV_BYTES_PER_TOKEN,
        peer_bytes_per_s=rates.peer_tokens_per_s * KV_BYTES_PER_TOKEN,
    )


class OurRouter:
    """A router before model replicas."""

    def __init__(self, replicas: Sequence[ModelReplica], settings: Settings) -> None:
        self._replicas = replicas
        machine = replicas[0].machine
        self._config = RouterConfig(
            replicas=tuple(
                ReplicaConfig(
                    url=f"http://r{each.slot}:1",
                    instance_id=f"r{each.slot}",
                    agent_url=f"http://r{each.slot}:2",
                    nixl_role="both" if settings.splits else None,
                )
                for each in replicas
            ),
            rates=_true_rates(machine) if settings.true_rates else RatesConfig(),
            **settings.sections,
        )
        self._loop = asyncio.get_running_loop()
        self.fleet = Fleet(self._config, settings.weights)
        self.network = Network()
        by_agent = {f"http://r{each.slot}:2": each for each in replicas}
        self._agents = {
            url: ModelAgent(each, by_agent, self.network) for url, each in by_agent.items()
        }
        self._scheduler = RequestScheduler(self.fleet)
        self._admission = AdmissionController(AdmissionQueue(self._scheduler), self._loop.time)
        self._stager = Stager(self._config, self.fleet, self._agents.__getitem__, self._loop.time)
        self._copies = settings.copies
        self._measures = settings.measures
        self._health = Health(replicas, self._health_changed)
        self._refused = self._remote_prefills = 0
        for each in replicas:
            self._meet(each)
            each.listeners.append(self)
        self._tasks = [
            self._loop.create_task(self._tick()),
            self._loop.create_task(self._health.watch()),
            self._loop.create_task(self._ask_infos()),
        ]

    # --- requests

    async def answer(self, sent: Sent) -> None:
        """Answer as `router.proxy.Proxy` does: admit, stage, forward, learn."""
        failed: list[str] = []
        try:
            self._admission.refuse_if_full(None, Priority.NORMAL)
            keys = PromptKeyCache(sent.prompt)
            for _ in range(self._config.retries + 1):
                if await self._try(sent, keys, failed):
                    return
        except RateLimitedError as refused:
            self._refused += 1
            sent.failed(
                refused.status,
                refused.message,
                self._loop.time(),
                retry_after_s=refused.retry_after_s,
            )
            return
        except NoReplicaError as none:
            sent.failed(none.status, none.message, self._loop.time())
            return
        sent.failed(503, "no replica could be reached", self._loop.time())

    async def _try(self, sent: Sent, keys: PromptKeyCache, failed: list[str]) -> bool:
        """Send a request to one replica; False while another may still be tried."""

        request = PlacementRequest(
            keys=keys,
            session=sent.session,
            exclude=tuple(failed),
            streamed=sent.streamed,
            output_tokens=self.fleet.output_lengths.expected(sent.session, None),
            may_split=not failed,
        )
        admitted = await self._admission.admit(request, at_once=bool(failed))
        decision, ticket = admitted.decision, admitted.ticket
        replica = self._replicas[decision.picked.replica.slot]
        ok, cached_tokens, output_tokens = False, None, None
        began = False

        def first_token(now_s: float) -> None:
            nonlocal began
            began = True
            sent.began(now_s)
            if sent.streamed:
                ticket.first_byte(now_s)
                self._admission.wake()

        try:
            prepared = await self._stager.prepare(decision)
            if ticket.first_leg is None and (decision.is_staged or prepared.waited_s > 0):
                ticket.sent(self._loop.time(), is_staged=prepared.is_staged)
            sent.record.headers = {"reason": str(decision.reason), **prepared.headers()}
            sent.record.predicted_ttft_s = decision.predicted_ttft_s
            lent = await self._prefill(ticket, sent)
            if lent is not None:
                decision, ticket = self._scheduler.second_leg(
                    request, decision, ticket, self._loop.time()
                )
                replica = self._replicas[ticket.replica.slot]
                ticket.pulls(self._loop.time())
            serving = replica.submit(sent.prompt, sent.output_tokens, first_token, pulls_from=lent)
            await serving.done
            if lent is not None:
                serving.request.cached = lent[1].cached
            if not sent.streamed:
                ticket.first_byte(self._loop.time(), streamed=False)
            ok, cached_tokens = True, serving.request.cached.total
            output_tokens = sent.output_tokens
            sent.served(replica.slot, serving.request, self._loop.time())
            self.fleet.output_lengths.note(sent.session, None, sent.output_tokens)
        except ReplicaDownError:
            failed.append(decision.replica_id)
            self._health.suspect(replica)
            return False
        except AnswerCutError:
            self._health.suspect(replica)
            if not began or not sent.streamed:
                failed.append(decision.replica_id)
                return False
            sent.failed(200, "the answer broke off", self._loop.time())
        except ValueError as error:
            sent.failed(400, str(error), self._loop.time())
        finally:
            ticket.finish(
                self._loop.time(),
                ok=ok,
                cached_tokens=cached_tokens,
                output_tokens=output_tokens,
            )
            self._admission.wake()
        return True

    async def _prefill(self, ticket: Ticket, sent: Sent) -> tuple[ModelReplica, SimRequest] | None:
        """Have another replica prefill the prompt if the decision says so; return who lends it."""
        leg = ticket.first_leg
        if leg is None:
            return None
        self._remote_prefills += 1
        lender = self._replicas[leg.replica.slot]
        serving = lender.submit(sent.prompt, 1, lambda _: None, lends=True)
        await serving.done
        leg.first_byte(self._loop.time())
        cached_tokens = serving.request.cached.total
        leg.finish(self._loop.time(), ok=True, cached_tokens=cached_tokens, output_tokens=1)
        self._admission.wake()
        return lender, serving.request

    def counts(self) -> dict[str, float]:
        """Return refusals, and what was moved between replicas."""
        return {
            "refused": self._refused,
            "copied_tokens": self.network.moved_tokens,
            "remote_prefills": self._remote_prefills,
        }

    # --- what replicas tell

    def stored(self, replica: int, tier: KvTier, keys: Sequence[int]) -> None:
        """Take over what a tier gained."""
        if tier is KvTier.GPU:
            self._apply(replica, BlocksStored(tier, keys))
        else:
            self.fleet.index.add(replica, tier, keys)

    def removed(self, replica: int, tier: KvTier, keys: Sequence[int]) -> None:
        """Take over what a tier lost."""
        if tier is KvTier.GPU:
            self._apply(replica, BlocksRemoved(tier, keys))
        else:
            self.fleet.index.remove(replica, tier, keys)

    def cleared(self, replica: int) -> None:
        """Forget a GPU's cache."""
        self._apply(replica, GpuCleared())

    def _apply(self, replica: int, event: KvEvent) -> None:
        now_s = self._loop.time()
        self.fleet.apply_kv(f"r{replica}", KvBatch(seq=0, ts=0.0, events=[event]), now_s)

    def _meet(self, replica: ModelReplica) -> None:
        """Begin to follow a replica."""
        name = f"r{replica.slot}"
        self.fleet.up(name)
        self._take_info(replica)
        self.fleet.following_kv(name)
        self.fleet.replicas[name].shape_checked = True
        self.fleet.set_kv_capacity(name, replica.machine.shape.gpu_tokens)

    def _take_info(self, replica: ModelReplica) -> None:
        """Learn who a replica is, as its agent tells."""
        machine = replica.machine
        per_chunk = machine.shape.chunk_tokens * KV_BYTES_PER_TOKEN
        engine = replica.engine
        name = f"r{replica.slot}"
        self.fleet.apply_info(
            name,
            InstanceInfo(
                instance_id=name,
                incarnation="model",
                model="model",
                hash_algorithm=HashScheme().algorithm,
                hash_seed="",
                block_tokens=machine.shape.block_tokens,
                chunk_tokens=machine.shape.chunk_tokens,
                chunk_bytes=per_chunk,
                tiers={
                    "cpu": self._tier(machine.cpu_chunks * per_chunk, engine.loads),
                    "disk": self._tier(machine.disk_chunks * per_chunk, engine.reads),
                },
                compute=engine.steps.rates() if self._measures else None,
                transfer_port=1 if self._copies else None,
                layout="model",
            ),
        )

    def _tier(self, capacity_bytes: int, reads: BandwidthMeter) -> TierInfo:
        per_s = reads.bytes_per_s() if self._measures else 0.0
        return TierInfo(
            capacity_bytes=capacity_bytes,
            used_bytes=0,
            read_bytes_per_s=per_s * KV_BYTES_PER_TOKEN,
            read_bytes=reads.total_bytes * KV_BYTES_PER_TOKEN,
        )

    def _health_changed(self, replica: ModelReplica, is_up: bool) -> None:
        name = f"r{replica.slot}"
        if is_up:
            self.fleet.up(name)
        else:
            self.fleet.down(name)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.fleet.tick(self._loop.time())

    async def _ask_infos(self) -> None:
        while True:
            await asyncio.sleep(_INFO_EVERY_S)
            for each in self._replicas:
                if each.is_alive:
                    self._take_info(each)

    async def stop(self) -> None:
        """End what runs in the background."""
        for task in self._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)
        await self._stager.stop()


def with_sections(settings: Settings, **sections: Any) -> Settings:
    """Return settings with other sections of the router's configuration."""
    return replace(settings, sections={**settings.sections, **sections})
