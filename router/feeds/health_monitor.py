"""Probe every replica: whether it is up, which models it serves, how much KV it holds, its load.

A probe whose connection is refused means that a replica is down; a request's only causes a probe. A
probe without an answer, or whose host name cannot be resolved, counts only when three follow each
other. A router without file descriptors or memory finds nothing out. Replicas that are down are
still probed, and the first good answer brings them back. A replica that sleeps, is paused or is
stuck answers ``/health``, and is down all the same. What replicas serve and how they tokenize is
asked when they are up, in a task of its own.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Final

import aiohttp
import orjson

from router.config.settings import DECODING_ROLES, ReplicaConfig, RouterConfig
from router.feeds.replica_answers import (
    SLEEP_STATE,
    authorization,
    engines,
    fetch,
    fetch_models,
    kv_capacity,
    load,
    served_models,
    sleeps,
    vllm_counters,
)
from router.fleet.cost_model import CostPart
from router.fleet.counter_speeds import CounterSpeeds, Others
from router.fleet.fleet import Fleet
from router.fleet.replica import PulledAnswers, Replica, Stall
from router.prompt.prompt_source import PromptSource, ServedModel
from router.prompt.tokenizer_store import TokenizerAgent
from router.record.records import Cause
from warmroute_common.config_reader import describe
from warmroute_common.connection_errors import connection_problem, is_exhausted, is_unresolved
from warmroute_common.tasks import all_set, end_all

log = logging.getLogger("warmroute.health")

_STANDSTILLS: Final = MappingProxyType(
    {
        "/is_sleeping": "it sleeps (/is_sleeping); POST /wake_up there wakes it",
        "/is_paused": "it is paused (/is_paused); POST /resume there ends that",
    }
)
"""Where vLLM says that it computes nothing (with VLLM_SERVER_DEV_MODE, without which it cannot be
told to sleep), and what that means."""
_COMPUTED: Final = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
)
"""Metrics of vLLM one of which changes with each of its steps."""

_FIRST_PROBES_S: Final = 1.0
"""How long the router's start waits for the first probes; its port is open after that."""
_SILENT_PROBES: Final = 3
_LEARN_S: Final = 120.0
"""To get a tokenizer from an agent takes seconds; each call has limits of its own."""
_MODELS_EVERY_PROBES: Final = 15
"""Between two questions for what a replica serves and holds."""
_STUCK_S: Final = 30.0
"""A replica with overdue requests that has computed nothing for this long is stuck."""
_LOOK_S: Final = 1.0
_ASKED_PER_S: Final = 50.0
_ASKED_AT_ONCE: Final = 16
"""Looks for unknown models: the pause between two, in addition to a time per replica; and how many
replicas are asked at the same time."""
_EXHAUSTED_EVERY_S: Final = 60.0
"""Between two log lines about probes for which the router has no resources."""


@dataclass
class _Standstill:
    """What a replica that answers health checks says about whether it computes."""

    hidden: set[str] = field(default_factory=set)
    """Those of `_STANDSTILLS` that it does not have."""
    says: dict[str, bool] = field(default_factory=dict)
    """What it said last at the others, and by its gauge of sleep."""
    computed: str = ""
    """`_COMPUTED` as they were last; empty if there was no reason to look, or it has none."""
    since_s: float = 0.0
    """When they were found to have changed."""
    is_stuck: bool = False


@dataclass
class _Watched:
    replica: Replica
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    up: bool | None = None
    silent_probes: int = 0
    probes: int = 0
    task: asyncio.Task[None] | None = None
    learning: asyncio.Task[None] | None = None
    """Asks what it serves and holds."""
    listed: Sequence[Mapping[str, object]] = ()
    """Its ``/v1/models``, as it answered last."""
    is_learned: bool = False
    """Whether that was done since it came up."""
    speeds: CounterSpeeds = field(default_factory=CounterSpeeds)
    standstill: _Standstill = field(default_factory=_Standstill)
    pulled: PulledAnswers = field(default_factory=PulledAnswers)
    """The replica's, as of the last reading of its speeds."""
    pulled_s: float = 0.0
    """About how long vLLM says that it has prefilled for those answers."""

    @property
    def config(self) -> ReplicaConfig:
        """The replica's, as it is now."""
        return self.replica.config


class HealthMonitor:
    """Probes every replica in a task of its own between `start` and `stop`."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        prompts: PromptSource,
        session: aiohttp.ClientSession,
        *,
        agents: Callable[[str], TokenizerAgent] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``agents`` returns the agent at a URL; it is asked for its replica's tokenizer.

        ``changed`` is called when a replica has been found to be up, down or silent.
        """
        self._agents = agents
        self._changed = changed
        self._watched: dict[Replica, _Watched] = {}
        self._timeouts = config.timeouts
        self._asks_load = config.shares_replicas
        self._fleet = fleet
        self._prompts = prompts
        self._session = session
        self._ending: set[asyncio.Task[None]] = set()
        self._exhausted_s = -inf
        self._look: asyncio.Task[None] | None = None
        """The last look at all models, which may be under way."""
        self._next_look_s = -inf

    async def start(self) -> None:
        """Begin to probe; return once every replica was probed, or after a second without.

        So the first request finds the replicas known, and a replica that is slow to answer
        keeps no request from the others.
        """
        for replica in self._fleet.replicas.values():
            self.joined(replica)
        await all_set((each.probed for each in self._watched.values()), _FIRST_PROBES_S)

    async def stop(self) -> None:
        """End the probing."""
        tasks = [task for each in self._watched.values() for task in (each.task, each.learning)]
        tasks.append(self._look)
        await end_all([*self._ending, *(each for each in tasks if each is not None)])

    def joined(self, replica: Replica) -> asyncio.Event:
        """Begin to probe a replica of the fleet; return what is set when that was done once."""
        watched = self._watched[replica] = _Watched(replica)
        watched.task = asyncio.create_task(self._watch(watched), name=f"health of {replica.id}")
        return watched.probed

    def left(self, replica: Replica) -> None:
        """Probe a replica no longer."""
        watched = self._watched.pop(replica)
        for task in (watched.task, watched.learning):
            if task is not None:
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                task.cancel()

    def listed(self, replica: Replica) -> Sequence[Mapping[str, object]]:
        """Return the entries of a replica's ``/v1/models`` as it answered last; none if never."""
        watched = self._watched.get(replica)
        return () if watched is None else watched.listed

    def look_again(self, replica: Replica) -> None:
        """Probe a replica now: whether it is up is not known any more."""
        if (watched := self._watched.get(replica)) is not None:
            watched.wake.set()

    def suspect(self, replica_id: str, cause: Cause) -> None:
        """A request failed there: probe the replica now. The probe decides whether it is up."""
        if (replica := self._fleet.replicas.find(replica_id)) is not None:
            if cause is Cause.NO_MODEL and (watched := self._watched.get(replica)) is not None:
                watched.is_learned = False
            self.look_again(replica)

    async def look_for_model(self) -> None:
        """Ask the replicas that are up for their models, unless they were asked just now.

        Requests for unknown models come here: all share one look, each waits for it for
        ``health_timeout_s`` at most, and there is a pause between two looks.
        """
        if self._look is None or (self._look.done() and time.monotonic() >= self._next_look_s):
            self._look = asyncio.create_task(self._look_for_models())
        await asyncio.wait([self._look], timeout=self._timeouts.health_timeout_s)

    async def _look_for_models(self) -> None:
        up = [each for each in self._watched.values() if each.up]
        turns = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def look(watched: _Watched) -> None:
            async with turns:
                before = watched.replica.models
                await self._ask_models(watched)
            if watched.replica.models != before:
                # Its tokenizer may be another's.
                watched.is_learned = False
                watched.wake.set()

        try:
            await asyncio.gather(*(look(each) for each in up))
        finally:
            self._next_look_s = time.monotonic() + _LOOK_S + len(up) / _ASKED_PER_S

    async def _watch(self, watched: _Watched) -> None:
        while True:
            watched.wake.clear()
            try:
                await self._probe(watched)
            except Exception:  # without probes a replica would stay as it is for ever
                log.exception("%s: probing it failed", watched.replica.id)
            if watched.learning is None:
                watched.probed.set()
            await all_set([watched.wake], self._timeouts.health_interval_s)

    async def _probe(self, watched: _Watched) -> None:
        config, began_s = watched.config, time.monotonic()
        try:
            problem = await self._problem(config)
        except TimeoutError:
            if watched.replica.heard_s > began_s:
                return  # it is busy, and alive: part of an answer or a KV event has come
            timeout_s = self._timeouts.health_timeout_s
            problem = f"/health does not answer within {timeout_s:g} s"
            self._no_answer(watched, problem, Stall.SILENT)
            return
        except (aiohttp.ClientError, OSError) as error:
            problem = connection_problem(error, config.url)
            if is_exhausted(error):
                self._log_exhausted(problem)
            elif is_unresolved(error):
                self._no_answer(watched, problem)
            else:
                watched.silent_probes = 0
                self._set_down(watched, problem)
            return
        watched.silent_probes = 0
        if problem is not None:
            self._set_down(watched, problem)
        elif (standstill := await self._standstill(watched)) is not None:
            self._set_down(watched, *standstill)
        else:
            await self._set_up(watched)

    async def _set_up(self, watched: _Watched) -> None:
        config = watched.config
        is_due = not watched.is_learned or watched.probes % _MODELS_EVERY_PROBES == 0
        served = None
        if is_due and watched.replica.models is None:
            # Before it is first called up: its first request finds its models known.
            served = await self._ask_models(watched)
        watched.probes += 1
        was_up, watched.up = watched.up, True
        if not was_up:
            log.info("%s (%s) is up", config.name, config.url)
        # Also when that is not news: a replica that was drained and resumed waits for it.
        self._fleet.up(watched.replica.id)
        if not was_up:
            self._changed()
        if is_due and (watched.learning is None or watched.learning.done()):
            watched.learning = asyncio.create_task(self._learn(watched, served))
        if self._asks_load:
            await self._ask_load(watched.replica)

    def _no_answer(self, watched: _Watched, problem: str, stall: Stall | None = None) -> None:
        watched.silent_probes += 1
        if watched.silent_probes >= _SILENT_PROBES:
            self._set_down(watched, problem, stall)
        elif watched.up is None:
            self._set_down(watched, problem)

    def _log_exhausted(self, problem: str) -> None:
        if time.monotonic() >= self._exhausted_s + _EXHAUSTED_EVERY_S:
            self._exhausted_s = time.monotonic()
            log.warning("the router has no resources to probe replicas: %s", problem)

    def _set_down(self, watched: _Watched, reason: str, stall: Stall | None = None) -> None:
        config, replica = watched.config, watched.replica
        if stall not in (Stall.ASLEEP, Stall.STUCK):
            watched.standstill = _Standstill()  # it may restart
        was_stalled, replica.stall = replica.stall, stall
        was_up, watched.up, watched.is_learned = watched.up, False, False
        if was_up is not False:
            log.warning("%s (%s) is down: %s", config.name, config.url, reason)
            self._prompts.compare_again(config.url)  # what comes up may be another
        self._fleet.down(replica.id, reason)
        if was_up is not False or stall is not was_stalled:
            self._changed()

    async def _problem(self, config: ReplicaConfig) -> str | None:
        """Return why a replica is not well, None if it is; raise what the connection raises.

        Any answer below 500 counts as well: not every OpenAI server has a ``/health``.
        """
        async with self._session.get(
            f"{config.url}/health",
            headers=authorization(config),
            timeout=aiohttp.ClientTimeout(total=self._timeouts.health_timeout_s),
        ) as response:
            return None if response.status < 500 else f"/health answers {response.status}"

    async def _standstill(self, watched: _Watched) -> tuple[str, Stall] | None:
        """Return why a replica that answers health checks computes nothing; None if it may."""
        standstill = watched.standstill
        await asyncio.gather(
            *(
                self._ask_standstill(watched, each)
                for each in _STANDSTILLS.keys() - standstill.hidden
            )
        )
        if standstill.says.get(SLEEP_STATE):
            await self._ask_metrics(watched)  # to see whether it still does
        for path, why in (*_STANDSTILLS.items(), (SLEEP_STATE, "it sleeps (engine_sleep_state)")):
            if standstill.says.get(path):
                return why, Stall.ASLEEP
        await self._look_at_work(watched)
        if not standstill.is_stuck:
            return None
        idle_s = time.monotonic() - standstill.since_s
        return (
            f"it answers /health, but computes nothing (for {idle_s:.0f} s) while requests wait",
            Stall.STUCK,
        )

    async def _ask_standstill(self, watched: _Watched, path: str) -> None:
        """Note what a replica says at a path; if it does not answer, what it said last counts."""
        config = watched.config
        try:
            async with self._session.get(
                f"{config.url}{path}",
                headers=authorization(config),
                timeout=aiohttp.ClientTimeout(total=self._timeouts.health_timeout_s),
            ) as response:
                if 400 <= response.status < 500:
                    watched.standstill.hidden.add(path)
                elif response.status == 200:
                    answer = orjson.loads(await response.read())
                    is_so = isinstance(answer, dict) and answer.get(path[1:]) is True
                    watched.standstill.says[path] = is_so
        except (aiohttp.ClientError, OSError, ValueError) as error:
            log.debug("%s does not answer at %s: %s", config.name, path, describe(error))

    async def _look_at_work(self, watched: _Watched) -> None:
        """Note whether a replica with overdue requests has computed something.

        A stuck one is tried again when it has, or if it is idle: after a while without requests.
        """
        standstill, now_s = watched.standstill, time.monotonic()
        if not (watched.replica.is_overdue or standstill.is_stuck):
            standstill.computed = ""
            return
        timeout_s = self._timeouts.health_timeout_s
        answer = await fetch(self._session, watched.config, "/metrics", timeout_s=timeout_s)
        metrics = (answer or b"").decode(errors="replace")
        lines = (each for each in metrics.splitlines() if each.startswith(_COMPUTED))
        computed = "\n".join(lines)
        since_s = now_s - standstill.since_s
        if not computed or computed != standstill.computed:
            standstill.computed, standstill.since_s = computed, now_s
            standstill.is_stuck = False
        elif standstill.is_stuck:
            if since_s >= 2 * _STUCK_S and load(metrics) == (0, 0):
                standstill.is_stuck, standstill.computed = False, ""
        else:
            standstill.is_stuck = since_s >= _STUCK_S

    async def _ask_models(self, watched: _Watched) -> list[ServedModel] | None:
        """Note what a replica serves; return None if it does not tell."""
        replica = watched.replica
        timeout_s = self._timeouts.health_timeout_s
        entries = await fetch_models(self._session, replica.config, timeout_s=timeout_s)
        if not entries:
            return None
        watched.listed = entries
        served = served_models(entries)
        models = {each.id: each.adapter_path for each in served}
        roots = {each.root for each in served if each.adapter_path is None}
        contexts = {each.id: each.max_model_len for each in served if each.max_model_len}
        self._fleet.set_models(replica.id, models, roots, contexts)
        return served

    async def _learn(self, watched: _Watched, served: list[ServedModel] | None) -> None:
        """Ask what a replica that is up serves (unless it is given) and holds; compare tokens."""
        try:
            served = served or await self._ask_models(watched)
            if served is not None:
                await self._compare_tokens(watched.replica, served)
            await self._ask_metrics(watched)
            watched.is_learned = bool(watched.up)
        except Exception:  # it is tried again after the next probe
            log.exception("%s: probing it failed", watched.replica.id)
        finally:
            watched.probed.set()

    async def _compare_tokens(self, replica: Replica, served: list[ServedModel]) -> None:
        config, agent = replica.config, None
        if self._agents is not None and config.agent_url is not None:
            agent = self._agents(config.agent_url)
        try:
            async with asyncio.timeout(_LEARN_S):
                await self._prompts.learn(
                    served,
                    session=self._session,
                    url=config.url,
                    headers=authorization(config),
                    agent=agent,
                )
        except TimeoutError:
            log.warning("%s: its tokens were not compared within %g s", config.name, _LEARN_S)
        self._fleet.match_by_text(
            {each.id for each in self._watched if self._prompts.differs(each.config.url)}
        )

    async def _ask_metrics(self, watched: _Watched) -> None:
        replica = watched.replica
        config = replica.config
        timeout_s = self._timeouts.health_timeout_s
        metrics = await fetch(self._session, config, "/metrics", timeout_s=timeout_s)
        if metrics is None:
            return
        text = metrics.decode(errors="replace")
        self._note_speeds(watched, text)
        self._fleet.set_ranks(replica.id, engines(text))
        says = watched.standstill.says
        slept, says[SLEEP_STATE] = says.get(SLEEP_STATE, False), sleeps(text)
        if says[SLEEP_STATE] and not slept:
            self.look_again(replica)
        try:
            tokens = kv_capacity(text)
        except ValueError as error:
            log.debug("%s does not tell its KV memory: %s", config.name, describe(error))
            return
        if tokens is not None:
            self._fleet.set_kv_capacity(replica.id, tokens)

    def _note_speeds(self, watched: _Watched, metrics: str) -> None:
        """Measure the server's speeds; most of them an engine of ours measures better."""
        replica, rates = watched.replica, watched.replica.rates
        counters = vllm_counters(replica.kv_bytes_per_token)
        others = {CostPart.PREFILL: self._pulled(watched)}
        for each in watched.speeds.read(metrics, counters, others):
            if each.part is CostPart.OUTPUT_TOKEN:
                replica.report_output_tokens(each.per_second, each.measured_on, time.monotonic())
            elif replica.config.agent_url is not None:
                continue
            elif each.part is CostPart.PREFILL:
                rates.report_prefill(each.per_second, each.measured_on)
            else:
                rates.report(*each)

    def _pulled(self, watched: _Watched) -> Others:
        """Return what of vLLM's counters of prefills is about prompts whose KV was pulled.

        vLLM counts their tokens as computed, and the first step of their answers as the time: one
        pulled prompt made a replica look 25 times as fast as it was (measured on an H100).
        """
        replica, before = watched.replica, watched.pulled
        now = watched.pulled = replace(replica.pulled)
        step_s = replica.rates.seconds(CostPart.OUTPUT_TOKEN)
        watched.pulled_s += (now.ended - before.ended) * step_s
        # The pulls of other routers are not known.
        is_shared = self._asks_load and replica.config.nixl_role in DECODING_ROLES
        return Others(
            now.counted_tokens,
            watched.pulled_s,
            are_known=now.uncounted == before.uncounted and not is_shared,
        )

    async def _ask_load(self, replica: Replica) -> None:
        timeout_s = self._timeouts.health_timeout_s
        metrics = await fetch(self._session, replica.config, "/metrics", timeout_s=timeout_s)
        running, waiting = load((metrics or b"").decode(errors="replace"))
        replica.note_load(running, waiting, time.monotonic())
