"""Reads prompts: a `PromptReader` for each model, and `PromptSource`, which knows them all.

`router.prompt.drafter` renders each prompt once. Long prompts are tokenized in a thread, one at a
time, and shorter ones first (`ReadingTurns`). The pieces of one prompt keep all cores busy, so
several prompts at once would all be ready only when the last one is.

The tokenizer is the configured one, else the model's own: replicas say in ``/v1/models`` which
directory or name each model comes from. If it is on this machine, it is loaded and its tokens are
compared with those of the replicas (`router.prompt.token_trust`). If they differ, the reader's
tokens are not used. Prompts of models without a tokenizer are matched by their text.
"""

import asyncio
import heapq
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import aiohttp

from router.agent_client import AgentError
from router.config.settings import TokenizerConfig
from router.prompt.chat_template import read_source
from router.prompt.drafter import (
    LONG_TOKEN_CHARS,
    Body,
    Draft,
    Drafter,
    PromptInput,
    TextInput,
    too_long,
)
from router.prompt.prompt import Prompt
from router.prompt.request_body import LARGE_BODY_BYTES
from router.prompt.token_cache import Memo
from router.prompt.token_trust import CHAT_PROBES, HANGS, TEXT_PROBES, Agreement, Trust, compare
from router.prompt.tokenizer_files import TokenizerFiles, load_directory
from router.prompt.tokenizer_store import (
    TokenizerAgent,
    TokenizerStore,
    TokenizerStoreError,
)
from warmroute_common.agent_protocol import GIVEN_TEMPLATE, TokenizerManifest
from warmroute_common.config_reader import ConfigError

_log = logging.getLogger("warmroute.prompt")

_CHARS_PER_S: Final = 5_000_000.0
"""Roughly what one core tokenizes."""

_INLINE_CHARS: Final = 64 * 1024
"""A prompt with more characters to tokenize is tokenized in a thread.

A shorter one keeps all cores busy for some milliseconds. In a thread it took 30 ms longer on a busy
machine, because the thread waits for the event loop again and again.
"""


class ReadingTurns:
    """Lets one prompt at a time be tokenized.

    The order is the time at which each prompt would be ready if it were alone, so no prompt
    starves: another one passes it only if it arrives while the first could have been read.
    Use it from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._taken = False
        self._asked = 0

    @asynccontextmanager
    async def turn(self, chars: int) -> AsyncIterator[None]:
        """Wait for a turn to read ``chars`` characters, and hold it for the block."""
        if self._taken:
            await self._wait(chars)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, chars: int) -> None:
        loop = asyncio.get_running_loop()
        given = loop.create_future()
        self._asked += 1
        alone_s = loop.time() + chars / _CHARS_PER_S
        heapq.heappush(self._waiting, (alone_s, self._asked, given))
        try:
            await given
        except asyncio.CancelledError:
            # The turn may have been granted in the same iteration of the loop.
            if not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            given = heapq.heappop(self._waiting)[2]
            if not given.done():  # else its client has gone
                given.set_result(None)
                return
        self._taken = False


class PromptReader:
    """Reads prompts for the replicas of one model. Without a tokenizer, prompts stay text."""

    def __init__(
        self,
        loaded: TokenizerFiles | None = None,
        *,
        chat_template: str | None = None,
        memo: Memo | None = None,
    ) -> None:
        """``chat_template`` is the source of the one that overrides the model's own.

        ``memo`` may be shared with the readers of other models, and is 64 MiB by default.
        Raises `ConfigError` when a template is none.
        """
        self.memo = Memo(64 << 20) if memo is None else memo
        self._drafter = Drafter(loaded, chat_template, self.memo)
        self._turns = ReadingTurns()
        self.has_tokenizer = loaded is not None
        """Whether prompts can have tokens at all."""
        by_files = Trust.EXACT if loaded and loaded.doubt is None else Trust.DOUBTFUL
        self._texts = Agreement(by_files)
        self._chats = Agreement(by_files)
        self._chat_probes = CHAT_PROBES
        self._chat_doubt = loaded.chat_doubt if loaded else None
        self._not_compared: dict[str, str] = {}
        """By replica, why its tokens could not be compared."""
        if loaded and loaded.chat_doubt:
            # Chats are rendered by other means than /tokenize: its agreement would be no proof.
            self._chats, self._chat_probes = Agreement(Trust.REFUTED), ()
        for reason in (loaded.doubt, loaded.chat_doubt) if loaded else ():
            if reason is not None:
                _log.warning("tokens may not be those of the replicas: %s", reason)

    @classmethod
    def load(
        cls,
        path: str | Path,
        chat_template: str | Path | None = None,
        memo: Memo | None = None,
    ) -> "PromptReader":
        """Return the reader for the model in directory ``path``.

        ``chat_template`` is a file, as for ``vllm serve --chat-template``.
        Raises `ConfigError`. Takes up to seconds for a large vocabulary.
        """
        source = None if chat_template is None else read_source(Path(chat_template))
        return cls(load_directory(Path(path)), chat_template=source, memo=memo)

    async def read(
        self,
        endpoint: str,
        body: dict[str, Any],
        body_bytes: float = 0,
        max_tokens: int | None = None,
    ) -> Prompt:
        """Return the prompt of a request to ``endpoint``; raise `BadRequestError` for wrong types.

        A prompt of more than ``max_tokens`` is a `BadRequestError` too; a text that is far longer
        is not tokenized. Long work runs in a thread and does not block the event loop.
        ``body_bytes`` is the body's length as it was sent; ``body`` is cleared if that is large.
        """
        prompt = await self._read(endpoint, body, body_bytes, max_tokens)
        if max_tokens is not None and prompt.exact and prompt.token_count > max_tokens:
            raise too_long(prompt.token_count, max_tokens)
        return prompt

    async def _read(
        self, endpoint: str, body: dict[str, Any], body_bytes: float, max_tokens: int | None
    ) -> Prompt:
        if body_bytes > LARGE_BODY_BYTES:
            draft = await asyncio.to_thread(self._draft, endpoint, body, max_tokens)
            body.clear()  # its texts are not needed after rendering
            async with self._turns.turn(draft.chars):
                return await asyncio.to_thread(draft.finish)
        draft = self._draft(endpoint, body, max_tokens)
        if _has_much_new(draft):
            async with self._turns.turn(draft.chars):
                # Of a burst with one beginning the first has read it for the others meanwhile.
                if _has_much_new(draft):
                    return await asyncio.to_thread(draft.finish)
        return draft.finish()

    def read_now(self, endpoint: str, body: Body) -> Prompt:
        """Return the prompt, in this thread."""
        return self._draft(endpoint, body).finish()

    async def verify(
        self,
        session: aiohttp.ClientSession,
        replica_url: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Compare our tokens of the probes with a replica's ``POST /tokenize``; True when equal.

        Tokens then count as exact. Where some differ, tokens of that kind (text, chat) are
        not used for this replica (`differs`), and the log says why. A replica that could not
        be asked changes nothing.
        """
        texts = [{"prompt": text} for text in TEXT_PROBES]
        try:
            texts_equal, max_len = await compare(session, replica_url, texts, self._claim, headers)
            chats_equal, _ = await compare(
                session, replica_url, self._chat_probes, self._claim, headers
            )
        except TimeoutError:
            self._note_not_compared(replica_url, HANGS)
            return False
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            self._note_not_compared(replica_url, str(error) or type(error).__name__)
            return False
        self._not_compared.pop(replica_url, None)
        self._drafter.max_model_len = max_len or self._drafter.max_model_len
        self._texts.note(replica_url, texts_equal)
        self._chats.note(replica_url, chats_equal)
        return texts_equal is True and chats_equal is not False

    def differs(self, replica_url: str) -> bool:
        """Whether tokens are used that this replica was found not to have."""
        return self._texts.differs(replica_url) or self._chats.differs(replica_url)

    def why_inexact(self, replica_urls: Sequence[str]) -> str | None:
        """Return why prompts for these replicas are not all matched by exact tokens, or None."""
        for kind, agreement in (("texts", self._texts), ("chats", self._chats)):
            for url in replica_urls:
                if agreement.is_equal(url) is False:
                    return f"its tokens of {kind} differ from those of {url}"
        if self._chat_doubt is not None:
            return f"{self._chat_doubt}, so its chats are matched by text"
        if self._texts.trust is Trust.DOUBTFUL:
            reasons = filter(None, map(self.not_compared, replica_urls))
            return f"its tokens are not confirmed ({next(reasons, 'no replica was compared')})"
        return None

    def is_confirmed(self) -> bool:
        """Whether a replica has our tokens of texts and of chats, as far as it has these."""
        return self._texts.is_confirmed and self._chats.trust is not Trust.REFUTED

    def compared(self, replica_url: str) -> tuple[bool | None, bool | None]:
        """Whether a replica was found to have our tokens of texts, and of chats; None: unknown."""
        return self._texts.is_equal(replica_url), self._chats.is_equal(replica_url)

    def not_compared(self, replica_url: str) -> str | None:
        """Why a replica's tokens could not be compared; `HANGS` if it did not answer in time."""
        return self._not_compared.get(replica_url)

    def _note_not_compared(self, replica_url: str, why: str) -> None:
        self._not_compared[replica_url] = why
        _log.warning("%s: tokens could not be compared (%s)", replica_url, why)

    def forget(self, replica_url: str) -> None:
        """Forget what was found of a replica."""
        self._not_compared.pop(replica_url, None)
        self._texts.forget(replica_url)
        self._chats.forget(replica_url)

    def _draft(self, endpoint: str, body: Body, max_tokens: int | None = None) -> Draft:
        return self._drafter.draft(endpoint, body, self._trust, max_tokens)

    def _trust(self, given: PromptInput) -> Trust:
        is_text = isinstance(given, TextInput) or self._texts.trust is Trust.REFUTED
        return self._texts.trust if is_text else self._chats.trust

    def _claim(self, probe: Body) -> list[int] | None:
        """Return the tokens that we would give for a probe, however far they are trusted."""
        draft = self._drafter.draft("/tokenize", probe, lambda given: Trust.EXACT)
        ids = draft.finish().token_ids
        return None if ids is None else list(ids)


def _has_much_new(draft: Draft) -> bool:
    if draft.cut is None or draft.chars <= _INLINE_CHARS:
        return False
    return draft.cut.new_chars() > _INLINE_CHARS


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
        self.text_reader = PromptReader(memo=self._memo)
        """Reads prompts by their text only."""
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
        return named or self._configured or self._by_root.get(root, self.text_reader)

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
        agree = [
            await reader.verify(session, url, headers=headers)
            for reader in readers
            if reader.has_tokenizer
        ]
        return all(agree) and len(agree) == len(readers)

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

    def _why_inexact(self, model: str, urls: Sequence[str]) -> str | None:
        reader = self.reader_for(model)
        if reader.has_tokenizer:
            return reader.why_inexact(urls)
        root = self._root_of.get(model, model)
        why = self._missing.get(root, "it was not found")
        return f"its tokenizer is missing: {why}; set agent_url, or tokenizer.path"

    def forget(self, url: str) -> None:
        """Forget a replica; readers of models that none serves any more go at the next `learn`."""
        self._replicas.pop(url, None)
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
        return [*self._named.values(), *own]

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
            log.warning("no tokenizer of '%s' (%s): its prompts are matched by text", root, why)

    def _load(self, path: Path, template: str | Path | None = None) -> PromptReader:
        template = template or self._config.chat_template
        return PromptReader.load(path, chat_template=template, memo=self._memo)


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
