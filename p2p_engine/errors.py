"""Every error that this package raises.

P2pError
├─ ConfigError              a setting is wrong: names the key, the value and what is allowed
├─ ProtocolError
│  ├─ LocalProtocolError    we used the engine wrongly
│  └─ RemoteProtocolError   the peer sent something that the protocol does not allow
├─ PeerError
│  ├─ PeerUnreachable       no answer to the first contact within its deadline
│  ├─ PeerRefused           the peer (or we) refused to pair: names the two values that differ
│  │  └─ AuthenticationFailed  one side does not have the other's key, or takes none
│  └─ PeerLost              the peer was there and is gone: silent, restarted or closed
│     └─ PeerRestarted      another engine has its address now
├─ TransferError
│  ├─ TransferTimeout       the deadline ended: names the key, the peer, the state, the seconds
│  ├─ TransferCancelled     withdrawn by its owner
│  ├─ TransferRejected      the peer failed it: binding mismatch, expired, abandoned, gone
│  ├─ TransferTooLarge      it can never fit in the receiver's store
│  └─ TransferCorrupted     the bytes that arrived are not those that left: their checksums differ
├─ TransportError           a native error and the call that it came from
└─ EngineClosed             the engine was closed while, or before, this was asked
"""


class P2pError(Exception):
    """The base of all errors of this package."""


class ConfigError(P2pError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class ProtocolError(P2pError):
    """The protocol was violated."""


class LocalProtocolError(ProtocolError):
    """The caller violated the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol."""


class PeerError(P2pError):
    """There is a problem with the peer itself."""


class PeerUnreachable(PeerError):
    """The peer did not answer the first contact within the deadline."""


class PeerRefused(PeerError):
    """The two engines cannot work together; the message names the values that differ."""


class AuthenticationFailed(PeerRefused):
    """The two sides do not belong to one fleet: they have different keys, or only one has any."""


class PeerLost(PeerError):
    """The peer fell silent, restarted or closed while a transfer was open."""


class PeerRestarted(PeerLost):
    """The peer is gone, and another engine answers at its address."""


class TransferError(P2pError):
    """One transfer ended without success."""


class TransferTimeout(TransferError, TimeoutError):
    """The deadline of a transfer ended."""


class TransferCancelled(TransferError):
    """The transfer was withdrawn by its owner."""


class TransferRejected(TransferError):
    """The peer ended the transfer; the message has its reason."""


class TransferTooLarge(TransferRejected):
    """The transfer is larger than the receiver's whole store."""


class TransferCorrupted(TransferError):
    """The bytes that arrived have another checksum than the bytes that left."""


class TransportError(P2pError):
    """A transport failed; the message has the native error and the call that it came from."""


class EngineClosed(P2pError):
    """The engine is closed."""


def named(error: BaseException) -> str:
    """Return an error's name and text, for a log line. A log record that kept the error itself
    would keep its frames, and the memory that they hold."""
    return f"{type(error).__name__}: {error}"
