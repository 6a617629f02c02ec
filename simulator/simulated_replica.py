"""One simulated replica: the model run against the clock, over a real engine and agent."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from simulator.engine_storage import EngineStorage, open_storage
from simulator.engine_tiers import EngineTiers, ObservedTiers
from simulator.kv_event_publisher import KvEventPublisher, TierEvents, encode_events
from simulator.model.lower_tier_view import LowerTiers, NoLowerTiers
from simulator.model.replica_model import ReplicaMeter, ReplicaModel
from simulator.model.sim_request import SimRequest
from simulator.nixl import NixlConnector, NixlNetwork, Pull
from simulator.openai_prompts import SimPrompt
from simulator.simulator_settings import SimulatorSettings

_LOG: Final = 100_000
"""Finished requests of one replica that are remembered; the oldest are forgotten first."""
_KNOWN_CHUNKS: Final = 2
"""Chunks whose blocks are remembered for each that the CPU RAM holds: others are on their way."""
_ASK_AGAIN_S: Final = 0.01
"""Seconds of the clock between looks at a request that waits for the lower tiers."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request and what its caller has not heard yet."""

    request: SimRequest
    prompt: SimPrompt
    news: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)
    """How many tokens there are by now, each time that the caller wants to know; 0: it failed."""
    pull: Pull | None = None
    """KV to pull, until that has ended."""
    is_garbled: bool = False
    """Whether it pulled what was not lent any more: the answer is wrong."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where its KV is lent, once it has finished."""

    @property
    def output_ids(self) -> Sequence[int]:
        """The answer that it gives."""
        right = self.prompt.output_ids
        return [each ^ 1 for each in right] if self.is_garbled else right


class SimulatedReplica:
    """Serves `submit` between `start` and `stop`, on one event loop."""

    def __init__(
        self,
        settings: SimulatorSettings,
        instance_id: str,
        *,
        agent_port: int = 0,
        nixl: NixlNetwork | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``nixl``: where other replicas can be pulled from; None: without NixlConnector."""
        self.settings = settings
        self.instance_id = instance_id
        self._agent_port = agent_port
        self.url = ""
        self.stream = KvEventPublisher(settings.host)
        self.log: deque[dict[str, Any]] = deque(maxlen=_LOG)
        self.model = ReplicaModel(settings.shape, settings.rates, NoLowerTiers())
        self._clock = clock
        self._began_s = clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self.max_lag_s = 0.0
        """How late, by the clock, the model was looked at when something was due."""
        self._running: dict[str, RunningRequest] = {}
        self._network = nixl
        self.nixl: NixlConnector | None = None
        self._number = 0
        self._tier_events = TierEvents(
            block_tokens=settings.shape.block_tokens,
            blocks_per_chunk=settings.shape.blocks_per_chunk,
            most=_KNOWN_CHUNKS * settings.cpu_chunks,
        )
        self._storage: EngineStorage | None = None
        self._tiers: LowerTiers | None = None

    @property
    def storage(self) -> EngineStorage:
        """The engine and what surrounds it, once started."""
        assert self._storage is not None
        return self._storage

    @property
    def agent_url(self) -> str:
        """Where the agent listens."""
        assert self.storage.agent.address is not None
        host, port = self.storage.agent.address
        return f"http://{host}:{port}"

    @property
    def wrong_chunks(self) -> int:
        """Chunks loaded that had other bytes than they should."""
        return self._tiers.wrong_chunks if isinstance(self._tiers, EngineTiers) else 0

    def now_s(self) -> float:
        """Return the time of the model."""
        return (self._clock() - self._began_s) * self.settings.speed

    def start(self, began_s: float) -> None:
        """Open the storage and the event stream; the model's time is 0 at ``began_s``."""
        self._loop = asyncio.get_running_loop()
        self._began_s = began_s
        self.stream.start()
        if self._network is not None:
            self.nixl = NixlConnector(
                self._network, self._end_loan, lease_s=self.settings.kv_lease_s
            )
        self._storage = open_storage(
            self.settings,
            self.instance_id,
            agent_port=self._agent_port,
            kv_events_port=_port(self.stream.endpoint),
            kv_replay_port=_port(self.stream.replay_endpoint),
        )
        self._tiers = ObservedTiers(
            self._storage.engine,
            noted=self._note_chunks,
            chunk_tokens=self.settings.shape.chunk_tokens,
            view=self._storage.engine.view,
            clock=self.now_s,
            prefill_tokens_per_s=self.settings.rates.prefill_tokens_per_s,
            speed=self.settings.speed,
            on_promoted=self._promoted,
        )
        shape, engine = self.settings.shape, self._storage.engine
        engine.steps.step_tokens = shape.max_batched_tokens
        bytes_per_token = self.settings.chunk_bytes / shape.chunk_tokens
        self.model = ReplicaModel(
            shape,
            self.settings.rates,
            self._tiers,
            meter=ReplicaMeter(
                engine.steps,
                engine.loads,
                bytes_per_token=bytes_per_token,
                speed=self.settings.speed,
            ),
        )

    async def stop(self) -> None:
        """End everything; requests still running hear nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        if self.nixl is not None:
            self.nixl.close()
            self.nixl = None
        if self._storage is not None:
            await asyncio.to_thread(self._storage.close)
        await self.stream.stop()

    # --- requests

    def submit(
        self,
        prompt: SimPrompt,
        *,
        name: str,
        emit_every: int,
        lends: bool = False,
        pull: Pull | None = None,
    ) -> RunningRequest:
        """Put a request into the queue. Raises ValueError for one that the GPU cannot hold.

        ``name`` is what the caller knows it by, for the log. Without NixlConnector, ``lends`` and
        ``pull`` have no effect, as in vLLM.
        """
        if self.nixl is None:
            lends, pull = False, None
        self._number += 1
        request = SimRequest(
            id=f"{self._number}-{name}",
            prompt_tokens=len(prompt.token_ids),
            output_tokens=len(prompt.output_ids),
            block_keys=prompt.block_keys,
            chunk_keys=prompt.chunk_keys,
            emit_every=emit_every,
            lends=lends,
            pull_tokens=0 if pull is None else len(prompt.token_ids),
        )
        running = RunningRequest(request, prompt, pull=pull)
        self._running[request.id] = running
        if pull is not None and (lender := self._lender(pull)) is not None:
            lender.keep(pull.request_id, lambda: request.id in self._running)
        try:
            self.model.arrive(request, self.now_s())
        except ValueError:
            del self._running[request.id]
            raise
        self._settle()
        return running

    def cancel(self, running: RunningRequest) -> None:
        """Forget a request that nobody waits for; nothing happens to one that is over."""
        if running.request.is_over:
            return
        self.model.cancel(running.request, self.now_s())
        self._settle()
        self._running.pop(running.request.id, None)
        self.refuse(running.pull)

    def refuse(self, pull: Pull | None) -> None:
        """Let the lender know that nobody pulls its KV from here; nothing for None."""
        if pull is not None and (lender := self._lender(pull)) is not None:
            lender.end(pull.request_id)

    def clear_gpu(self) -> bool:
        """Empty the GPU's prefix cache; False while requests use some of it."""
        self.model.advance(self.now_s())
        cleared = self.model.clear_gpu()
        self._settle()
        return cleared

    # --- time

    def bring_up_to_date(self) -> None:
        """Let the model come to the present."""
        self.model.advance(self.now_s())
        self._settle()

    def _promoted(self) -> None:
        """Some promotion has ended, on an I/O thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._poke)

    def _poke(self) -> None:
        if self._storage is not None and self.model.is_blocked:
            self.model.poke(self.now_s())
            self._settle()

    def _tick(self) -> None:
        self._timer = None
        self.max_lag_s = max(self.max_lag_s, self._clock() - self._due_s)
        if self.model.is_blocked:
            self.model.poke(self.now_s())
        else:
            self.model.advance(self.now_s())
        self._settle()

    def _settle(self) -> None:
        """Pass on what the model has told, and come back when it will tell more."""
        self._publish()
        for request, tokens in self.model.take_pulled():
            self._end_pull(self._running[request.id], tokens)
        for request, generated, _ in self.model.take_progress():
            running = self._running.get(request.id)
            if running is None:
                continue  # its pull failed
            if request in self.model.lent and self.nixl is not None:
                running.kv_transfer_params = self.nixl.lend(request)
            running.news.put_nowait(generated)
            if generated == request.output_tokens:
                del self._running[request.id]
                self.log.append(self._finished(running))
        self._set_timer()

    def _lender(self, pull: Pull) -> NixlConnector | None:
        return None if self._network is None else self._network.lender(pull)

    def _end_loan(self, request: SimRequest) -> None:
        self.model.end_loan(request, self.now_s())
        self._settle()

    def _end_pull(self, running: RunningRequest, tokens: int) -> None:
        """Tell the lender that its KV was pulled, or fail the request if there is none."""
        pull, running.pull = running.pull, None
        assert pull is not None
        lender = self._lender(pull)
        if lender is not None:
            was_lent = lender.end(pull.request_id)
            running.is_garbled = not was_lent and tokens > 0
        elif tokens > 0:
            self.model.cancel(running.request, self.now_s())
            self._publish()
            del self._running[running.request.id]
            running.news.put_nowait(0)

    def _publish(self) -> None:
        events = self.model.take_events()
        # vLLM asks its connector at the end of a step, and an idle scheduler makes none.
        lower = (
            self._tier_events.vllm_events(self.storage.engine.take_events())
            if self._running
            else []
        )
        if events or lower:
            block_tokens = self.settings.shape.block_tokens
            self.stream.publish(
                encode_events(events, self._prompt, block_tokens, time.time(), lower)
            )

    def _note_chunks(self, request: SimRequest, chunks: Iterable[int]) -> None:
        self._tier_events.learn(self._prompt(request.id), chunks)

    def _set_timer(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self.model.next_s()
        waits = [] if next_s is None else [(next_s - self.now_s()) / self.settings.speed]
        if self.model.is_blocked:
            waits.append(_ASK_AGAIN_S)
        if waits:
            # uvloop rounds to milliseconds: a wake-up that is too early has no effect.
            wait_s = max(0.0, math.ceil(1000 * min(waits) + 0.5) / 1000)
            self._due_s = self._clock() + wait_s
            self._timer = self._loop.call_later(wait_s, self._tick)

    def _prompt(self, request_id: str) -> SimPrompt:
        return self._running[request_id].prompt

    def _finished(self, running: RunningRequest) -> dict[str, Any]:
        request = running.request
        return {
            "request_id": request.id.partition("-")[2],
            "instance_id": self.instance_id,
            "arrived_s": request.arrived_s,
            "first_token_s": request.first_token_s,
            "finished_s": request.finished_s,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "cached_tokens": {
                "gpu": request.cached.gpu,
                "cpu": request.cached.cpu,
                "disk": request.cached.disk,
            },
        }


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
