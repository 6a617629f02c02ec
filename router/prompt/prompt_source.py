"""Which tokenizer reads a request's prompt: the configured one, else the model's own.

Replicas say in ``/v1/models`` which directory or name each model comes from.
Where its tokenizer is on this machine it is loaded, and its tokens compared
with the replica's. Prompts of models without one are matched by their text.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

import aiohttp

from router.config.settings import TokenizerConfig
from router.prompt.prompt_reader import PromptReader
from router.prompt.token_cache import Memo
from warmroute_common.config_reader import ConfigError

log = logging.getLogger("warmroute.tokenizer")

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")

# A replica that deviates, or could not be asked, is asked again after this time,
# and after twice as long each time that this changes nothing.
_ASK_AGAIN_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 3600.0

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


@dataclass(kw_only=True)
class _Replica:
    """What a replica serves, and when its tokens are compared next."""

    models: list[ServedModel]
    version: str | None
    due_s: float = -inf
    pause_s: float = _ASK_AGAIN_S


class PromptSource:
    """Holds a `PromptReader` for each model that is served; `learn` adds and drops them.

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
        self._text = PromptReader(memo=self._memo)
        self._configured = None if config.path is None else self._load(Path(config.path))
        self._by_root: dict[str, PromptReader] = {}
        self._root_of: dict[str, str] = {}
        self._replicas: dict[str, _Replica] = {}

    def reader_for(self, model: str | None) -> PromptReader:
        """Return the reader of prompts for a model; without a name, that for the only one."""
        if self._configured is not None:
            return self._configured
        if model is None and len(self._by_root) == 1:
            return next(iter(self._by_root.values()))
        return self._by_root.get(self._root_of.get(model or "", ""), self._text)

    async def learn(
        self,
        models: Sequence[ServedModel],
        *,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
    ) -> None:
        """Load what is new among the models of the replica at ``url``, and compare tokens there.

        They are compared once: again only when the replica has another version or other
        models, after `compare_again`, or, where they did not agree, after a pause.
        A tokenizer that is not on this machine, or does not load, is logged
        once; its prompts stay text.
        """
        replica = self._replicas.get(url)
        version = await _version(session, url, headers)
        # A version that is missing now does not count as another version.
        if replica is None or replica.models != [*models] or version not in (None, replica.version):
            replica = self._replicas[url] = _Replica(models=[*models], version=version)
            for reader in self._readers():
                reader.forget(url)
        await self._load_and_drop()
        if self._clock() < replica.due_s:
            return
        replica.due_s = self._clock() + replica.pause_s
        replica.pause_s = min(2 * replica.pause_s, _LONGEST_PAUSE_S)
        readers = {self.reader_for(model.id) for model in models}
        agree = [
            await reader.verify(session, url, headers=headers)
            for reader in readers
            if reader.has_tokenizer
        ]
        if all(agree):
            replica.due_s, replica.pause_s = inf, _ASK_AGAIN_S

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
        return [self._configured] if self._configured else list(self._by_root.values())

    async def _load_and_drop(self) -> None:
        """Load readers for the models that replicas serve now, and drop those of all others."""
        async with self._lock:
            served = [model for each in self._replicas.values() for model in each.models]
            self._root_of = {model.id: model.root for model in served}
            if self._configured is not None:
                return
            for root in {model.root for model in served} - self._by_root.keys():
                self._by_root[root] = await asyncio.to_thread(self._load_root, root)
            for root in self._by_root.keys() - {model.root for model in served}:
                del self._by_root[root]

    def _load_root(self, root: str) -> PromptReader:
        """Return the reader for a model, or that of text; reads files."""
        path = local_model(root, os.environ)
        if path is None:
            log.warning(
                "no tokenizer of '%s' on this machine: its prompts are matched by their text; "
                "set tokenizer.path to match them by tokens",
                root,
            )
            return self._text
        try:
            reader = self._load(path)
        except ConfigError as error:
            log.warning("%s; prompts of '%s' are matched by their text", error, root)
            return self._text
        log.info("prompts for '%s' are tokenized with %s", root, path)
        return reader

    def _load(self, path: Path) -> PromptReader:
        template = self._config.chat_template
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
