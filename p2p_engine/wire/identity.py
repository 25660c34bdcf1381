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
MAX_SHOWN = 200  # characters of a name or a value: whoever sent them may have sent long ones
_ABSENT = "(default, or accepted)"


def digest_of(identity: Identity) -> bytes:
    """Return the digest by which two identities are compared."""
    return hashlib.blake2b(_plain(identity), digest_size=DIGEST_BYTES).digest()


def pack(identity: Identity) -> bytes:
    """Return the fields as a message carries them; NO_FIELDS if they are too many for one."""
    packed = zlib.compress(_plain(identity))
    return packed if len(packed) <= MAX_IDENTITY_BYTES else NO_FIELDS


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


def differences(here: Identity, there: Identity, *, at_most: int = MAX_NAMED) -> list[str]:
    """Name each field that differs, with both values; beyond `at_most`, how many more there are."""
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    named = [
        f"{_printable(name)}: {_shown(here, name)} here, {_shown(there, name)} there"
        for name in names[:at_most]
    ]
    return named + ([f"and {len(names) - at_most} more"] if len(names) > at_most else [])


def _shown(identity: Identity, name: str) -> str:
    return repr(identity.get(name, _ABSENT)[:MAX_SHOWN])


def _printable(name: str) -> str:
    """Show a name that a peer has chosen on one line."""
    return name[:MAX_SHOWN] if name.isprintable() else repr(name[:MAX_SHOWN])


def _plain(identity: Identity) -> bytes:
    return msgspec.msgpack.encode(sorted(identity.items()))


NO_FIELDS = zlib.compress(_plain({}))
