"""Where are compiled images kept between processes? Files with a checksum; corrupt is a miss, writes are atomic."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from perseus_compile import env

_log = logging.getLogger(__name__)
_MAGIC = b"PERSEUS1"
_HEADER_BYTES = len(_MAGIC) + 32


class ImageCache:
    """Images by key.

    Args:
        folder: made when the first image is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"

    def load(self, key: str) -> bytes | None:
        """The image, or None where there is none or its bytes are not what was stored."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        image = data[_HEADER_BYTES:]
        if data[:_HEADER_BYTES] == _MAGIC + hashlib.sha256(image).digest():
            return image
        _log.warning(
            "kernel cache: %s is corrupt (%d bytes) and is built again; if this repeats, check that disk",
            path,
            len(data),
        )
        return None

    def store(self, key: str, image: bytes) -> bool:
        """False where the folder cannot be written; the image in hand stays good."""
        try:
            replace_file(self.path(key), _MAGIC + hashlib.sha256(image).digest() + image)
        except OSError as error:
            _log.warning(
                "kernel cache: %s cannot be written (%s), so every process compiles; set %s to another folder",
                self.folder,
                error,
                env.CACHE_DIR.name,
            )
            return False
        return True


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file as a whole: readers see the old bytes or the new ones. Makes the folder.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def default_folder() -> Path:
    """PERSEUS_CACHE_DIR, else the user's cache folder."""
    named = env.CACHE_DIR.read()
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "perseus_compile" / "kernels"
