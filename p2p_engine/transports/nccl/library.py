"""libnccl through ctypes. One configuration structure serves all versions from 2.18 on: the library
copies the part that it knows, and ignores fields newer than `version` says.

The field order is that of nccl.h 2.28.9, followed by fields of later releases. Results, names and
the meaning of unset values are also from that header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p

from p2p_engine.errors import ConfigError, TransportError

SONAME = "libnccl.so.2"  # torch for CUDA has loaded its own by this name
OLDEST_VERSION = 21800
UNIQUE_ID_BYTES = 128
IN_PROGRESS = 7
BYTES = 1  # ncclUint8

_CONFIG_MAGIC = 0xCAFEBEEF
_UNSET = -(1 << 31)


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """ncclConfig_t; every field but the first three starts unset."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
        ("graphUsageMode", c_int),
        ("numRmaCtx", c_int),
        ("maxP2pPeers", c_int),
        ("graphStreamOrdering", c_int),
        ("launchOrderImplicit", c_int),
        ("numRmaSig", c_int),
        ("rmaEagerInit", c_int),
        ("hostCftMode", c_int),
        ("nvlsHostMode", c_int),
    ]

    @classmethod
    def of(cls, version: int, num_channels: int) -> Config:
        """Return the configuration of a non-blocking communicator with exactly so many channels.

        Between hosts, NCCL uses two of them for each network card unless it is told otherwise
        (since 2.28). An implicit order of launches would make our kernels and the model's wait for
        each other (2.31 and newer; older releases only have a variable for it).
        """
        config = cls(ctypes.sizeof(cls), _CONFIG_MAGIC, version)
        for name, kind in (field[:2] for field in cls._fields_[3:]):
            setattr(config, name, None if kind is c_char_p else _UNSET)
        config.blocking = 0
        config.minCTAs = config.maxCTAs = config.nChannelsPerNetPeer = num_channels
        config.launchOrderImplicit = 0
        return config


_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "ncclGetVersion": (c_void_p,),
    "ncclGetUniqueId": (c_void_p,),
    "ncclCommInitRankConfig": (c_void_p, c_int, UniqueId, c_int, c_void_p),
    "ncclCommGetAsyncError": (c_void_p, c_void_p),
    "ncclCommAbort": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommCount": (c_void_p, c_void_p),
    "ncclCommUserRank": (c_void_p, c_void_p),
    "ncclCommCuDevice": (c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_TEXTS = {"ncclGetErrorString": (c_int,), "ncclGetLastError": (c_void_p,)}
# In libraries of FIRST_TO_REGISTER and later, unless they were built without it.
_REGISTRATION: dict[str, tuple[object, ...]] = {
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, c_void_p),
    "ncclCommDeregister": (c_void_p, c_void_p),
}
FIRST_TO_REGISTER = 21900


def show_version(version: int) -> str:
    """Return a version code in the usual form: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Nccl:
    """One loaded libnccl; communicators are plain integers.

    Only one thread at a time may use a communicator. `abort` and `destroy` may be called from any
    thread, and may block.
    """

    def __init__(self, path: str = "") -> None:
        """Load the library from `path`, or else take torch's, or the system's where torch has none.

        Raises:
            ConfigError: there is none, or it is older than 2.18.
        """
        try:
            self.library = ctypes.CDLL(path or SONAME)
        except OSError as error:
            raise ConfigError(f"NCCL cannot be loaded: {error}") from error
        self._bind(c_int, _FUNCTIONS)
        self._bind(c_char_p, _TEXTS)
        self.has_initialised = False  # a communicator, in this process
        self.version = self._get_version()
        if self.version < OLDEST_VERSION:
            oldest = show_version(OLDEST_VERSION)
            raise ConfigError(f"NCCL {show_version(self.version)} is older than {oldest}")
        self.can_register = self.version >= FIRST_TO_REGISTER and all(
            hasattr(self.library, name) for name in _REGISTRATION
        )
        if self.can_register:
            self._bind(c_int, _REGISTRATION)

    def unique_id(self) -> bytes:
        """Open a rendezvous for two ranks. It keeps a thread and a descriptor until both have
        joined, so ask for it only when the other rank is known to join."""
        unique_id = UniqueId()
        self._call("ncclGetUniqueId", byref(unique_id))
        return bytes(memoryview(unique_id))

    def init(self, unique_id: bytes, rank: int, num_channels: int, num_ranks: int = 2) -> int:
        """Start to make a communicator on the thread's device; `is_in_progress` tells when it is
        made.

        Raises:
            TransportError: NCCL refused at once.
        """
        comm = c_void_p()
        config = Config.of(self.version, num_channels)
        opaque = UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRankConfig", byref(comm), num_ranks, opaque, rank, byref(config))
        return comm.value or 0

    def is_in_progress(self, comm: int) -> bool:
        """Whether a call of this communicator has not ended yet; never blocks.

        Raises:
            TransportError: the communicator has failed.
        """
        result = c_int()
        self._call("ncclCommGetAsyncError", comm, byref(result))
        if result.value not in (0, IN_PROGRESS):
            raise self._error("ncclCommGetAsyncError", result.value)
        return result.value == IN_PROGRESS

    def send(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue a send; its kernel waits on the device until the peer receives."""
        self._call("ncclSend", address, nbytes, BYTES, peer, comm, stream)

    def recv(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue a receive; its kernel waits on the device until the peer sends."""
        self._call("ncclRecv", address, nbytes, BYTES, peer, comm, stream)

    def start_group(self) -> None:
        """Start to collect this thread's sends and receives."""
        self._call("ncclGroupStart")

    def end_group(self) -> None:
        """Enqueue the collected calls together."""
        self._call("ncclGroupEnd")

    def abort(self, comm: int) -> None:
        """End a communicator, whatever it does; its kernels end and leave garbage. May block until
        a live peer on the same host ends its side too."""
        self._call("ncclCommAbort", comm)

    def destroy(self, comm: int) -> None:
        """End an idle communicator; may block as `abort` does."""
        self._call("ncclCommDestroy", comm)

    def register(self, comm: int, address: int, nbytes: int) -> int:
        """Register memory with this communicator; only if `can_register`."""
        handle = c_void_p()
        self._call("ncclCommRegister", comm, address, nbytes, byref(handle))
        return handle.value or 0

    def deregister(self, comm: int, handle: int) -> None:
        """Undo a registration."""
        self._call("ncclCommDeregister", comm, handle)

    def _bind(self, result: object, functions: Mapping[str, tuple[object, ...]]) -> None:
        """Declare functions by name, with their arguments and their common result type."""
        for name, arguments in functions.items():
            try:
                function = getattr(self.library, name)
            except AttributeError as error:
                raise ConfigError(f"not the expected library: {error}") from error
            function.argtypes, function.restype = arguments, result

    def _get_version(self) -> int:
        version = c_int()
        self._call("ncclGetVersion", byref(version))
        return version.value

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self.library, name)(*arguments)
        if result not in (0, IN_PROGRESS):
            raise self._error(name, result)

    def _error(self, name: str, result: int) -> TransportError:
        text = (self.library.ncclGetErrorString(result) or b"").decode(errors="replace")
        last = (self.library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        return TransportError(f"{name}: {text} ({result}){': ' + last if last else ''}")
