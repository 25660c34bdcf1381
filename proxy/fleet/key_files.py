"""Files of keys: read whole, and only if others cannot read them."""

from __future__ import annotations

import os
import stat

from p2p_engine.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


def read_lines(setting: str, path: str) -> list[str]:
    """Return the lines of a file of keys.

    Raises:
        ConfigError: it cannot be read, others can, or it is too large.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path!r} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{setting} {path!r} is larger than {MAX_FILE_BYTES} bytes")
    # A secret that a container gets may be of a group; its owner is then somebody else.
    is_ours = status.st_uid == os.geteuid()
    if status.st_mode & (stat.S_IRWXO | (stat.S_IRWXG if is_ours else 0)):
        raise ConfigError(f"{setting} {path!r} is open to others: chmod 600 {path}")
    return text.splitlines()


def read_key(setting: str, path: str) -> str:
    """Return the key in a file of one key; empty if there is no file.

    Raises:
        ConfigError: it cannot be used.
    """
    if not path:
        return ""
    key = "\n".join(read_lines(setting, path)).strip()
    if not key:
        raise ConfigError(f"{setting} {path!r} is empty")
    if not key.isprintable():
        raise ConfigError(f"{setting} {path!r} has more than one line, or odd characters")
    return key
