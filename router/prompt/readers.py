"""Which tokenizer reads a request's prompt: the configured one, else the model's own.

Replicas say in ``/v1/models`` which directory or name each model comes from.
Where its tokenizer is on this machine it is loaded, and its tokens compared
with the replica's. Prompts of models without one are matched by their text.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from router.config import ConfigError, TokenizerConfig
from router.prompt.reader import PromptReader

log = logging.getLogger("warmroute.tokenizer")

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as a replica's ``/v1/models`` lists it."""

    id: str
    """The name that requests use."""
    root: str
    """Where it comes from: a directory or a name; the base model's for an adapter."""
    adapter_path: str | None = None
    """Where a LoRA adapter itself comes from, as the replica wrote it; None for a model."""


class PromptSource:
    """Holds a `PromptReader` for each model; `learn` adds them as replicas tell."""

    def __init__(
        self, config: TokenizerConfig, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Load the configured tokenizer, if one is; raises `ConfigError`."""
        self._config = config
        self._environment = environment
        self._lock = asyncio.Lock()
        self._text = PromptReader.load(None, memo_bytes=config.memo_bytes)
        self._configured = None if config.path is None else self._load(Path(config.path))
        self._by_root: dict[str, PromptReader] = {}
        self._root_of: dict[str, str] = {}

    def reader_for(self, model: str | None) -> PromptReader:
        """Return who reads the prompts for a model; without a name, for the only one."""
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
        """Load what is new among the models of the replica at ``url``, and verify it there.

        A tokenizer that is not on this machine, or does not load, is logged
        once; its prompts stay text.
        """
        for model in models:
            self._root_of[model.id] = model.root
        async with self._lock:
            for root in {model.root for model in models}:
                if self._configured is None and root not in self._by_root:
                    self._by_root[root] = await asyncio.to_thread(self._load_root, root)
        for reader in {self.reader_for(model.id) for model in models}:
            if reader.has_tokenizer:
                await reader.verify(session, url, headers=headers)

    def _load_root(self, root: str) -> PromptReader:
        """Return the reader for a model, or that of text; reads files."""
        path = local_model(root, self._environment)
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
        return PromptReader.load(
            path, chat_template=self._config.chat_template, memo_bytes=self._config.memo_bytes
        )


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
