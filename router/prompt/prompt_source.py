"""The `PromptReader` of each model that replicas serve: where its tokenizer comes from.

It is the configured one, else the model's own: replicas say in ``/v1/models`` which directory or
name each model comes from. If it is on this machine, it is loaded, and its tokens are compared with
those of the replicas. Else the replica's agent sends it. Where there is none, or where its tokens
are not those of the replicas, a replica is asked for the tokens of each long prompt. What nobody
tokenizes is matched by its text.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import aiohttp

from router.agent_client import AgentError
from router.config.settings import TokenizerConfig
from router.prompt.drafter import LONG_TOKEN_CHARS
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from router.prompt.replica_tokenizer import ReplicaTokenizer, TokenizingReplica
from router.prompt.token_cache import Memo
from router.prompt.tokenizer_store import (
    TokenizerAgent,
    TokenizerStore,
    TokenizerStoreError,
)
from warmroute_common.agent_protocol import GIVEN_TEMPLATE, TokenizerManifest
from warmroute_common.config_reader import ConfigError

log = logging.getLogger("warmroute.tokenizer")

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")

# A replica that deviates, or could not be asked, is asked again after this time,
# and after twice as long each time that this changes nothing.
_ASK_AGAIN_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 3600.0

_NOT_HERE: Final = "not on this machine, and no agent sends it"

_SOON: Final = aiohttp.ClientTimeout(total=2.0)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as a replica's ``/v1/models`` lists it."""

    id: str
    """The name that requests use."""
    root: str
    """Where it comes from: a directory or a name; the base model's for an adapter."""
    adapter_path: str | None = None
    """Where a LoRA adapter itself comes from, as the replica wrote it; None for a model."""
    max_model_len: int | None = None
    """How many tokens its context takes, if the replica tells."""


@dataclass(kw_only=True)
class _Replica:
    """What a replica serves, and when its tokens are compared next."""

    models: list[ServedModel]
    version: str | None
    has_agent: bool = False
    is_learned: bool = False
    """Whether its models' tokenizers were looked for, and its tokens compared, once."""
    due_s: float = -inf
    pause_s: float = _ASK_AGAIN_S


class PromptSource:
    """Holds a `PromptReader` for each model that is served; `learn` adds and drops them.

    A tokenizer is the configured one; or the one on this machine; or, where there is none or where
    a replica was found to have another, the one that the replica's agent sends.
    All readers share one memo.
    """

    def __init__(
        self,
        config: TokenizerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the configured tokenizer, if one is; raises `ConfigError`."""
        self._config = config
        self._clock = clock
        self._lock = asyncio.Lock()
        self._memo = Memo(config.memo_bytes)
        self._text_reader = PromptReader(memo=self._memo)
        """Reads prompts by their text only."""
        self.replica_tokenizer: ReplicaTokenizer | None = None
        """Asks replicas for tokens; None: they are not asked."""
        self._store = TokenizerStore(config)
        self._taking = asyncio.Lock()
        self._configured = None if config.path is None else self._load(Path(config.path))
        self._named = {
            name: self._load(Path(each.path), each.chat_template)
            for name, each in config.models.items()
        }
        self._named_roots: dict[str, PromptReader] = {}
        """The same by root, for LoRA adapters."""
        self._by_root: dict[str, PromptReader] = {}
        self._without: dict[str, PromptReader] = {}
        """By root, readers without a tokenizer, which know how replicas tokenize."""
        self._sent: dict[str, str] = {}
        """By root, the digest of the tokenizer that an agent has sent."""
        self._missing: dict[str, str] = {}
        """By root, why there is no tokenizer."""
        self._root_of: dict[str, str] = {}
        self._replicas: dict[str, _Replica] = {}

    def reader_for(self, model: str | None) -> PromptReader:
        """Return the reader of prompts for a model; without a name, that for the only one."""
        roots = {*self._root_of.values()}
        root = next(iter(roots), "") if model is None and len(roots) == 1 else None
        root = self._root_of.get(model or "", "") if root is None else root
        named = self._named.get(model or "") or self._named_roots.get(root)
        found = named or self._configured or self._by_root.get(root)
        return found or self._without.get(root, self._text_reader)

    def ask_replicas(
        self,
        session: aiohttp.ClientSession,
        replicas: Callable[[], Iterable[TokenizingReplica]],
    ) -> None:
        """Ask ``replicas()`` for tokens from now on, unless the configuration says not to."""
        if self._config.ask_replicas:
            self.replica_tokenizer = ReplicaTokenizer(
                session, replicas, self._memo, clock=self._clock
            )

    async def read(
        self,
        endpoint: str,
        body: dict[str, Any],
        body_bytes: float,
        model: str | None,
        *,
        is_cut: bool,
    ) -> Prompt:
        """Return the prompt of a request: see `PromptReader.read`.

        ``is_cut``: strings of ``body`` are incomplete, so it is read as text only.
        """
        reader = self._text_reader if is_cut else self.reader_for(model)
        return await reader.read(
            endpoint,
            body,
            body_bytes,
            self.max_model_len(model),
            replicas=None if is_cut else self.replica_tokenizer,
        )

    def max_model_len(self, model: str | None) -> int | None:
        """Return the longest context of a model at any replica; None if one does not tell.

        Without a name, of all models.
        """
        lengths = [
            each.max_model_len
            for replica in list(self._replicas.values())  # threads call this too
            for each in replica.models
            if model is None or each.id == model
        ]
        known = [each for each in lengths if each is not None]
        return max(known) if known and len(known) == len(lengths) else None

    def most_chars(self, model: str | None) -> int | None:
        """Return how long a text may be that is tokenized for a model; None if that is not known.

        May be called in any thread.
        """
        length = self.max_model_len(model)
        return None if length is None else length * LONG_TOKEN_CHARS

    async def learn(
        self,
        models: Sequence[ServedModel],
        *,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        agent: TokenizerAgent | None = None,
    ) -> None:
        """Load what is new among the models of the replica at ``url``, and compare tokens there.

        They are compared once: again only when the replica has another version or other
        models, after `compare_again`, or, where they did not agree, after a pause.
        A tokenizer that nobody has, or that does not load, is logged once; its prompts stay text,
        and it is looked for again at each call.
        """
        replica = self._replicas.get(url)
        version = await _version(session, url, headers)
        # A version that is missing now does not count as another version.
        if replica is None or replica.models != [*models] or version not in (None, replica.version):
            replica = self._replicas[url] = _Replica(models=[*models], version=version)
            for reader in self._readers():
                reader.forget(url)
        replica.has_agent = agent is not None
        await self._load_and_drop()
        if agent is None:
            for model in models:
                if not self.reader_for(model.id).has_tokenizer and model.root not in self._missing:
                    self._note_missing(model.root, _NOT_HERE)
        is_due = self._clock() >= replica.due_s
        if is_due:
            replica.due_s = self._clock() + replica.pause_s
            replica.pause_s = min(2 * replica.pause_s, _LONGEST_PAUSE_S)
        agree = is_due and await self._agrees(models, session, url, headers)
        if agent is not None and not agree and await self._take_from(agent, models, url, is_due):
            agree = await self._agrees(models, session, url, headers)
        if agree:
            replica.due_s, replica.pause_s = inf, _ASK_AGAIN_S
        replica.is_learned = True

    async def _agrees(
        self,
        models: Sequence[ServedModel],
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
    ) -> bool:
        """Compare tokens of these models with a replica's; whether all are known to be equal."""
        readers = {self.reader_for(model.id) for model in models}
        replica, agree = self._replicas[url], []
        for reader in readers:
            if reader.has_tokenizer or replica.version is not None:
                before = reader.answers(url)
                agree.append(await reader.verify(session, url, headers=headers))
                is_new = before == (None, None)
                has_changed = not is_new and reader.answers(url) != before
                if reader.asked() and (has_changed or (is_new and reader.deviates(url))):
                    self._compare_others(url)
        return all(agree) and all(each.has_tokenizer for each in readers)

    def _compare_others(self, url: str) -> None:
        """Have all other replicas compared again: one has changed, so the others may have too.

        Templates may write the date, and then all replicas change at midnight.
        """
        for other in self._replicas.keys() - {url}:
            self.compare_again(other)

    async def _take_from(
        self, agent: TokenizerAgent, models: Sequence[ServedModel], url: str, is_due: bool
    ) -> bool:
        """Use an agent's tokenizer where ours is missing or another.

        Returns whether the tokenizer is another one now: then it must be compared.
        """
        roots = {
            model.root
            for model in models
            if self._configured is None and model.root not in self._named_roots
            if self._wants(model.root, url, is_due)
        }
        if not roots:
            return False
        try:
            manifest = await agent.tokenizer()
            digest = manifest.digest()
            roots = {root for root in roots if self._sent.get(root) != digest}
            if roots:
                async with self._taking:
                    # Another replica's agent may have sent the same meanwhile.
                    new = {root for root in roots if self._sent.get(root) != digest}
                    await self._take(agent, manifest, new)
        except (AgentError, TokenizerStoreError, ConfigError) as error:
            for root in roots - self._by_root.keys():
                self._note_missing(
                    root, f"not on this machine, and its agent did not send it: {error}"
                )
            return False
        return bool(roots)

    async def _take(
        self, agent: TokenizerAgent, manifest: TokenizerManifest, roots: Collection[str]
    ) -> None:
        """Use an agent's tokenizer for these models."""
        if not roots:
            return
        path = await self._store.fetch(agent, manifest)
        template = path / GIVEN_TEMPLATE if GIVEN_TEMPLATE in manifest.files else None
        reader = await asyncio.to_thread(self._load, path, template)
        for root in roots:
            self._by_root[root], self._sent[root] = reader, manifest.digest()
            self._missing.pop(root, None)
            log.info("prompts for '%s' are tokenized with the files that its agent has sent", root)
        # All replicas are compared with the new one.
        for each in self._replicas.values():
            if any(model.root in roots for model in each.models):
                each.due_s, each.pause_s = -inf, _ASK_AGAIN_S

    def _wants(self, root: str, url: str, is_due: bool) -> bool:
        """Whether an agent's tokenizer would be better than ours: unless a replica has ours."""
        reader = self._by_root.get(root)
        if reader is None:
            return True
        return is_due and False in reader.compared(url) and not reader.is_confirmed()

    def inexact(self) -> dict[str, str | None]:
        """Return for each model why its prompts are not matched by exact tokens, or None.

        LoRA adapters are their base models. Servers that are not vLLM's are left out: nothing that
        they hold is known by tokens.
        """
        urls: dict[str, list[str]] = {}
        for url, replica in self._replicas.items():
            if replica.is_learned and (replica.version is not None or replica.has_agent):
                for model in replica.models:
                    if model.adapter_path is None:
                        urls.setdefault(model.id, []).append(url)
        return {model: self._why_inexact(model, its_urls) for model, its_urls in urls.items()}

    def asked(self) -> dict[str, str]:
        """Return for each model that replicas tokenize prompts for why they do."""
        reasons = {model: self._why_asked(model) for model in self.inexact()}
        return {model: why for model, why in reasons.items() if why is not None}

    def _why_inexact(self, model: str, urls: Sequence[str]) -> str | None:
        reader = self.reader_for(model)
        asked = reader.asked()
        for agreement in asked.values():
            silent = [each for each in agreement.alike() if not self._answers(each)]
            if len(silent) == len(agreement.alike()):
                return f"{self._why_asked(model)}, and {silent[0]} does not tell them in time"
        if reader.has_tokenizer or asked:
            return reader.why_inexact(urls)
        why = self._why_missing(model)
        return f"its tokenizer is missing: {why}; set agent_url, or tokenizer.path"

    def _why_asked(self, model: str) -> str | None:
        return self.reader_for(model).why_asked(self._why_missing(model))

    def _why_missing(self, model: str) -> str:
        return self._missing.get(self._root_of.get(model, model), "it was not found")

    def _answers(self, url: str) -> bool:
        return self.replica_tokenizer is None or self.replica_tokenizer.answers(url)

    def forget(self, url: str) -> None:
        """Forget a replica; readers of models that none serves any more go at the next `learn`."""
        self._replicas.pop(url, None)
        if self.replica_tokenizer is not None:
            self.replica_tokenizer.forget(url)
        for reader in self._readers():
            reader.forget(url)

    def compare_again(self, url: str) -> None:
        """Have the tokens of a replica compared at the next `learn`: it may have restarted."""
        if replica := self._replicas.get(url):
            replica.due_s, replica.pause_s = -inf, _ASK_AGAIN_S

    def differs(self, url: str) -> bool:
        """Whether a replica makes other tokens of its prompts than their reader."""
        return any(reader.differs(url) for reader in self._readers())

    def _readers(self) -> list[PromptReader]:
        own = [self._configured] if self._configured else list(self._by_root.values())
        return [*self._named.values(), *own, *self._without.values()]

    async def _load_and_drop(self) -> None:
        """Load readers for the models that replicas serve now, and drop those of all others."""
        async with self._lock:
            served = [model for each in self._replicas.values() for model in each.models]
            self._root_of = {model.id: model.root for model in served}
            self._named_roots = {
                model.root: self._named[model.id] for model in served if model.id in self._named
            }
            if self._configured is not None:
                return
            roots = {*self._root_of.values()} - self._named_roots.keys()
            for root in roots - self._by_root.keys():
                await asyncio.to_thread(self._load_root, root)
            lacking = roots - self._by_root.keys()
            self._without = {
                root: self._without.get(root) or self._bare_reader() for root in lacking
            }
            for root in self._by_root.keys() - roots:
                del self._by_root[root]
                self._sent.pop(root, None)
            for root in self._missing.keys() - roots:
                del self._missing[root]

    def _load_root(self, root: str) -> None:
        """Load the reader of a model from this machine's files, if they are here."""
        path = local_model(root, os.environ)
        if path is None:
            return
        try:
            self._by_root[root] = self._load(path)
        except ConfigError as error:
            self._note_missing(root, str(error))
            return
        self._missing.pop(root, None)
        log.info("prompts for '%s' are tokenized with %s", root, path)

    def _note_missing(self, root: str, why: str) -> None:
        """Log why there is no tokenizer, unless that was logged."""
        if self._missing.get(root) != why:
            self._missing[root] = why
            then = "its prompts are matched by text"
            if self._config.ask_replicas:
                then += ", unless replicas tokenize them (ask_replicas)"
            log.warning("no tokenizer of '%s' (%s): %s", root, why, then)

    def _bare_reader(self) -> PromptReader:
        return PromptReader(memo=self._memo, asks_replicas=self._config.ask_replicas)

    def _load(self, path: Path, template: str | Path | None = None) -> PromptReader:
        template = template or self._config.chat_template
        return PromptReader.load(
            path, template, self._memo, asks_replicas=self._config.ask_replicas
        )


async def _version(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
) -> str | None:
    """Return the version of vLLM that a replica runs, None if it does not tell."""
    try:
        async with session.get(f"{url}/version", headers=headers, timeout=_SOON) as response:
            return str((await response.json())["version"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        return None


def local_model(model: str, environment: Mapping[str, str]) -> Path | None:
    """Return the directory on this machine that has the tokenizer of ``model``, or None.

    Looked for as a directory, then in the Hugging Face cache.
    """
    direct = Path(model).expanduser()
    if _has_tokenizer(direct):
        return direct
    home = environment.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    hub = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    repository = hub / f"models--{model.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if _has_tokenizer(snapshot) else None


def _has_tokenizer(directory: Path) -> bool:
    try:
        return any((directory / name).is_file() for name in _TOKENIZER_FILES)
    except OSError:
        # A replica's own path, which this user may not look into.
        return False
