"""Which weights a model path stands for, without reading gigabytes."""

import hashlib
from pathlib import Path
from typing import Final

_SMALL_FILE_BYTES: Final = 1 << 20


def weights_fingerprint(model: str) -> str:
    """Return 32 hex digits that change when the files of a local model change.

    Covers every file directly in the directory: name and size of each,
    content of the small ones (configuration), modification time of the large
    ones (weights). Copying a model may change it, and then costs a cold
    cache; replacing one in place must change it. Returns "" when ``model`` is
    not a local directory: then the name alone says which weights are meant.
    """
    directory = Path(model)
    if not directory.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0".encode())
        if stat.st_size <= _SMALL_FILE_BYTES:
            digest.update(path.read_bytes())
        else:
            digest.update(str(stat.st_mtime_ns).encode())
    return digest.hexdigest()[:32]
