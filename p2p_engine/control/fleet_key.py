"""Keys: the secrets of a fleet, from which all of its CURVE keys derive. No sockets here.

A key file has one secret in each line, 64 hexadecimal digits. Every holder of a secret belongs to
the fleet. An engine serves and dials with the first secret and accepts the others, so that keys can
be replaced without a stop.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import TypeAlias

from p2p_engine.errors import ConfigError

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_SECRETS = 8
MAX_FILE_BYTES = 1 << 14
Secrets: TypeAlias = tuple[bytes, ...]

_HEADER = """\
# Key of a p2p-engine fleet. Every holder of this file is a member: keep it secret, mode 0600.
# One secret in each line; the first is used, the others are accepted too (see docs/security.md).
"""


def write_key_file(path: Path) -> None:
    """Write a file with a new secret, readable by its owner only.

    Raises:
        ConfigError: the file exists already, and is left as it is; or it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists; it is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{_HEADER}{secrets.token_hex(SECRET_BYTES)}\n")


def read_key_file(path: str) -> Secrets:
    """Return the secrets of a key file, the one to use first; none if `path` is empty.

    Raises:
        ConfigError: the file cannot be read, everybody may read it, or a line (named) is no secret.
    """
    if not path:
        return ()
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key_file {path!r} cannot be read: {error}") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"key_file {path!r} is open to everybody: chmod 600 {path}")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = [_secret(path, number, line) for number, line in lines if line and line[0] != "#"]
    if not 1 <= len(set(found)) == len(found) <= MAX_SECRETS:
        allowed = f"1 to {MAX_SECRETS} different secrets"
        raise ConfigError(f"key_file {path!r} has {len(found)} secrets; allowed: {allowed}")
    return tuple(found)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Return the CURVE secret key of a purpose (at most 16 bytes): BLAKE2b, keyed."""
    return hashlib.blake2b(key=secret, person=purpose, digest_size=SECRET_BYTES).digest()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this host; a name is not looked up."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return host == "localhost"


def exposure(host: str, secrets: Secrets) -> str:
    """Say what is wrong with listening on this host with these secrets, or ""."""
    if secrets or is_loopback(host):
        return ""
    return (
        f"NOT AUTHENTICATED: anyone who can reach {host} can register, read and write KV. "
        "Make a key with `p2p-engine keygen FILE`, give it to every instance and proxy, and name "
        "it as key_file."
    )


def warn_if_exposed(host: str, secrets: Secrets) -> None:
    """Log a warning that cannot be missed, once per process for each host."""
    text = exposure(host, secrets)
    if text:
        _warn(text)


@functools.lru_cache(maxsize=64)
def _warn(text: str) -> None:
    frame = "!" * 88
    logger.warning("\n%s\n%s\n%s", frame, text, frame)


def _secret(path: str, number: int, line: str) -> bytes:
    with contextlib.suppress(ValueError):
        secret = bytes.fromhex(line)
        if len(secret) == SECRET_BYTES and len(line) == 2 * SECRET_BYTES:
            return secret
    digits = 2 * SECRET_BYTES
    raise ConfigError(f"key_file {path!r}, line {number}: not {digits} hexadecimal digits")
