"""Tokenizers that agents have sent, in a directory, each under the digest of its files.

The directory outlives the router, so a tokenizer is sent once. Files in it are verified by their
digests each time.
"""

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from router.config.settings import TokenizerConfig
from warmroute_common.agent_protocol import (
    MAX_TOKENIZER_BYTES,
    TokenizerFile,
    TokenizerManifest,
    is_tokenizer_file,
)

_UNFINISHED: Final = ".unfinished-"


class TokenizerStoreError(Exception):
    """A tokenizer could not be kept; the text says why."""


class TokenizerAgent(Protocol):
    """What is asked of an agent; every call raises `router.agent_client.AgentError`."""

    async def tokenizer(self) -> TokenizerManifest:
        """Return which files the replica's tokenizer is made of."""

    async def tokenizer_file(self, file: TokenizerFile) -> bytes:
        """Return one of these files, verified."""


class TokenizerStore:
    """A bounded directory of tokenizers; the least recently used ones are removed."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config

    async def fetch(self, agent: TokenizerAgent, manifest: TokenizerManifest) -> Path:
        """Return the directory with the files of a manifest; ask the agent if there is none yet.

        To be called by one task at a time. Raises `TokenizerStoreError`, and what the agent's
        calls raise.
        """
        _check(manifest)
        try:
            root = await asyncio.to_thread(self._root)
            directory = root / manifest.digest()
            if not await asyncio.to_thread(_is_whole, directory, manifest):
                await self._download(agent, manifest, directory)
                with suppress(OSError):  # another router may remove some at the same time
                    await asyncio.to_thread(self._evict, root, directory)
        except OSError as error:
            raise TokenizerStoreError(
                f"cannot keep a tokenizer ({error}); set tokenizer.cache_directory to a "
                "directory that this user may write"
            ) from error
        return directory

    async def _download(
        self, agent: TokenizerAgent, manifest: TokenizerManifest, directory: Path
    ) -> None:
        parent = directory.parent
        made = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=_UNFINISHED, dir=parent))
        try:
            for name, file in manifest.files.items():
                data = await agent.tokenizer_file(file)
                await asyncio.to_thread(_write, made / name, data)
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            await asyncio.to_thread(made.replace, directory)
        finally:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)

    def _root(self) -> Path:
        """Return the first directory that can be written; raise OSError if none can."""
        problem: OSError | None = None
        for root in self._candidates():
            try:
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                if root.stat().st_uid != os.getuid():
                    raise PermissionError(f"{root} is another user's")
                tempfile.TemporaryFile(dir=root).close()
            except OSError as error:
                problem = problem or error
            else:
                return root
        assert problem is not None
        raise problem

    def _candidates(self) -> Iterator[Path]:
        if self._config.cache_directory is not None:
            yield Path(self._config.cache_directory)
            return
        with suppress(RuntimeError):  # this user has no home
            home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
            yield Path(home) / "warmroute" / "tokenizers"
        yield Path(tempfile.gettempdir()) / f"warmroute-tokenizers-{os.getuid()}"

    def _evict(self, root: Path, kept: Path) -> None:
        """Remove what was not used for the longest time, until the rest is within the limit."""
        others = [each for each in root.iterdir() if each != kept]
        used_bytes = _size(kept) + sum(map(_size, others))
        for each in sorted(others, key=lambda path: path.stat().st_mtime):
            if used_bytes <= self._config.cache_bytes:
                return
            used_bytes -= _size(each)
            shutil.rmtree(each, ignore_errors=True)


def _check(manifest: TokenizerManifest) -> None:
    """Raise `TokenizerStoreError` for files that cannot be a tokenizer's."""
    strange = [name for name in manifest.files if not is_tokenizer_file(name)]
    if strange:
        raise TokenizerStoreError(f"{strange[0]!r} is not a file of a tokenizer")
    size = sum(each.size for each in manifest.files.values())
    if size > MAX_TOKENIZER_BYTES:
        raise TokenizerStoreError(f"the tokenizer's files have {size} bytes, which is too much")


def _is_whole(directory: Path, manifest: TokenizerManifest) -> bool:
    """Whether all files are there as they were sent; mark them as used then."""
    try:
        for name, file in manifest.files.items():
            if hashlib.sha256((directory / name).read_bytes()).hexdigest() != file.sha256:
                return False
        os.utime(directory)
    except OSError:
        return False
    return {*_names(directory)} == manifest.files.keys()


def _names(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        if not path.is_dir():
            yield str(path.relative_to(directory))


def _size(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*"))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
