"""The files of the replica's tokenizer, which the agent sends to routers on other machines.

Routers tokenize prompts as this replica does, and cannot see its disk. Only files that a tokenizer
is made of are sent: `warmroute_common.agent_protocol` has their names and the largest sizes.
"""

import hashlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from warmroute_common.agent_protocol import (
    GIVEN_TEMPLATE,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_FILE_BYTES,
    TEMPLATES_FOLDER,
    TokenizerFile,
    TokenizerManifest,
    is_tokenizer_file,
)
from warmroute_common.api_errors import NotFoundError

logger = logging.getLogger("vllm.warmroute")

_TEMPLATE_CHARS: Final = "{}\n"
"""A ``--chat-template`` with one of these, which is not a file, is the template itself."""

_Stat = tuple[str, int, int]


class ServedTokenizer:
    """One tokenizer's files, and the chat template that replaces the model's own, if any.

    The files are read when they are asked for, and again after they have changed. The methods do
    I/O, and may be called from several threads.
    """

    def __init__(self, directory: Path | None, chat_template: str | None = None) -> None:
        """``chat_template`` is the value of vLLM's ``--chat-template``: a file, or the template."""
        self._directory = directory
        self._template = None if chat_template is None else _template(chat_template)
        self._lock = threading.Lock()
        self._stats: list[_Stat] = []
        self._manifest: TokenizerManifest | None = None

    def manifest(self) -> TokenizerManifest:
        """Return the files with their digests; raise `NotFoundError` if there is no tokenizer."""
        with self._lock:
            files = dict(self._files())
            if not files:
                raise NotFoundError("this replica has no tokenizer files on its disk")
            stats = [_stat(name, path) for name, path in sorted(files.items())]
            largest, whole = max(size for _, size, _ in stats), sum(size for _, size, _ in stats)
            if largest > MAX_TOKENIZER_FILE_BYTES or whole > MAX_TOKENIZER_BYTES:
                raise NotFoundError(f"the tokenizer's files are too large to send ({whole} bytes)")
            if self._manifest is None or stats != self._stats:
                described = {name: _described(path.read_bytes()) for name, path in files.items()}
                if self._template is not None:
                    described[GIVEN_TEMPLATE] = _described(self._template)
                self._manifest, self._stats = TokenizerManifest(files=described), stats
            return self._manifest

    def content(self, sha256: str) -> bytes:
        """Return the file with this digest; raise `NotFoundError` if there is none now."""
        for name, each in self.manifest().files.items():
            if each.sha256 == sha256:
                data = (
                    self._template
                    if name == GIVEN_TEMPLATE
                    else dict(self._files())[name].read_bytes()
                )
                if data is not None and _described(data) == each:
                    return data
        raise NotFoundError("the tokenizer has no such file; ask for /tokenizer again")

    def _files(self) -> Iterator[tuple[str, Path]]:
        if self._directory is None:
            return
        folder = self._directory / TEMPLATES_FOLDER
        for parent, prefix in ((self._directory, ""), (folder, f"{TEMPLATES_FOLDER}/")):
            for path in sorted(parent.iterdir()) if parent.is_dir() else ():
                name = prefix + path.name
                if is_tokenizer_file(name) and name != GIVEN_TEMPLATE and path.is_file():
                    yield name, path


def _stat(name: str, path: Path) -> _Stat:
    found = path.stat()
    return name, found.st_size, found.st_mtime_ns


def _described(data: bytes) -> TokenizerFile:
    return TokenizerFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def _template(given: str) -> bytes | None:
    try:
        return Path(given).read_bytes()
    except (OSError, ValueError):  # ValueError: no file has such a name
        if any(char in given for char in _TEMPLATE_CHARS):
            return given.encode()
    logger.warning("--chat-template %s is not a file here: routers do not get it", given)
    return None
