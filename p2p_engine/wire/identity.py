"""Identity: what decides the KV of a prompt, as names and values; peers compare its digest.

A cache's description has the digest, which is all that a peer needs to pair. Only a directory says
the fields, so that a refusal can name those that differ.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import msgspec

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.messages import MAX_IDENTITY_BYTES

Identity = Mapping[str, str]

DIGEST_BYTES = 16
MAX_PLAIN_BYTES = 1 << 18  # of a peer's fields, once they are unpacked
MAX_NAMED = 8  # differing fields in one refusal
_ABSENT = "(default)"


def digest_of(identity: Identity) -> bytes:
    """Return the digest by which two identities are compared."""
    return hashlib.blake2b(_plain(identity), digest_size=DIGEST_BYTES).digest()


def pack(identity: Identity) -> bytes:
    """Return the fields as a message carries them; b"" if they are too many for one."""
    packed = zlib.compress(_plain(identity))
    return packed if len(packed) <= MAX_IDENTITY_BYTES else b""


def unpack(packed: bytes) -> Identity:
    """Return the fields that a peer has packed.

    Raises:
        RemoteProtocolError: they are not fields, or too long.
    """
    if not packed:
        return {}
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, MAX_PLAIN_BYTES)
        if not unpacking.eof:
            raise RemoteProtocolError(f"an identity of more than {MAX_PLAIN_BYTES} bytes")
        return dict(msgspec.msgpack.decode(plain, type=list[tuple[str, str]]))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"bad identity of {len(packed)} bytes: {error}") from error


def differences(here: Identity, there: Identity) -> list[str]:
    """Name each field that differs, with both values; beyond MAX_NAMED, how many more there are."""
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    named = [
        f"{name}: {here.get(name, _ABSENT)!r} here, {there.get(name, _ABSENT)!r} there"
        for name in names[:MAX_NAMED]
    ]
    return named + ([f"and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else [])


def _plain(identity: Identity) -> bytes:
    return msgspec.msgpack.encode(sorted(identity.items()))
