"""What the fuzzer says: from noise to real messages at the wrong time. Pure; all from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgpack  # type: ignore[import-untyped]
import msgspec

from p2p_engine.transports.handshake import PREAMBLE
from p2p_engine.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AnyMessage,
    CacheSpec,
    Heartbeat,
    Hello,
    Lookup,
    Manifest,
    PageShape,
    Part,
    Plane,
    TransferKey,
    encode_heartbeat,
)

KINDS: Sequence[type] = get_args(AnyMessage)
EDGES = (0, 1, 2, 255, 1 << 15, 1 << 31, (1 << 31) + 1, 1 << 48, (1 << 63) - 1, (1 << 64) - 1, -1)
WORDS = ("", "x", "shm", "tcp", "127.0.0.99:7", "[::1]:5", "no address", "\0", "é" * 200)
_encode = msgspec.msgpack.Encoder().encode


class Frames:
    """One seed's frames for one victim; `epochs` are ours and the victim's."""

    def __init__(self, rng: random.Random, epochs: tuple[int, int]) -> None:
        self._rng = rng
        self.epochs = epochs
        self._said: list[bytes] = []  # real ones, to be said again, in another order

    def hello(self) -> bytes:
        """Say who we are, rightly."""
        ours = self.epochs[0]
        return _encode(Hello(ours, 0, PROTOCOL_VERSION, "127.0.0.99:7", None, {}))

    def control(self) -> bytes:
        """For a ROUTER of an engine or a directory."""
        kinds = (self._noise, self._changed, self._wrong_types, self._replayed, self._message)
        weights = (1, 2, 2, 2, 3)
        return self._rng.choices(kinds, weights)[0]()

    def heartbeat(self) -> bytes:
        """For the registration port of a proxy."""
        rng = self._rng
        if rng.random() < 0.3:
            return rng.choice((self._noise, self._wrong_types, self.control))()
        beat = Heartbeat(
            rng.choice(("P", "D", "PD", "X", "")),
            f"127.0.0.99:{rng.randrange(1, 20)}" if rng.random() < 0.8 else rng.choice(WORDS),
            rng.choice(WORDS),
            rng.choice((None, PROTOCOL_VERSION, 1 << 31, 99)),
            epoch=rng.choice(EDGES),
            model=rng.choice(WORDS),
            interval=rng.choice((0.0, 0.1, 3.0, 86400.0, 1e300, float("nan"))),
            leaving=rng.random() < 0.3,
            relayed=rng.random() < 0.5,
            warning=rng.choice(WORDS),
        )
        try:
            frame = encode_heartbeat(beat)
        except OverflowError:
            return b""
        return self._spoil(frame) if rng.random() < 0.2 else frame

    def preamble(self) -> bytes:
        """For a data port: a wrong token, half of one, more than one, or segments at once."""
        rng = self._rng
        epoch = rng.choice((*self.epochs, rng.getrandbits(64)))
        whole = PREAMBLE.pack(epoch & ((1 << 64) - 1), rng.randbytes(16))
        return rng.choice((b"", whole, whole[: rng.randrange(24)], whole + rng.randbytes(200)))

    def greeting(self) -> bytes:
        """For a ZMQ port: what is no ZMTP, or only almost."""
        rng = self._rng
        signature = b"\xff" + bytes(8) + b"\x7f"
        version = bytes(rng.choice(((3, 1), (3, 0), (2, 0), (9, 9), (0, 0))))
        mechanism = rng.choice((b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"\xff" * 20, b""))
        whole = signature + version + mechanism.ljust(20, b"\0") + bytes([rng.randrange(3)])
        whole = whole.ljust(64, b"\0")
        command = b"\x04" + bytes([rng.randrange(256)]) + b"\x05READY" + rng.randbytes(40)
        hello = b"\x04\xc8\x05HELLO\x01\x00" + rng.randbytes(193)
        message = b"\x02" + (1 << 62).to_bytes(8, "big") + b"x"
        return rng.choice(
            (
                b"", whole, whole[: rng.randrange(64)], self._spoil(whole), rng.randbytes(100),
                whole + command, whole + hello, whole + hello[:50], whole + message,
                whole + b"\x04\x06\x05READY" + message, b"GET / HTTP/1.1\r\n\r\n",
            )
        )  # fmt: skip

    def http(self) -> bytes:
        """For the HTTP port of a proxy."""
        rng = self._rng
        body = rng.choice(
            (
                b"{", b"[]", b"null", b'{"prompt": 1e999}', b"[" * 5000, rng.randbytes(100),
                b'{"model": "tiny", "prompt": {"a": [1]}, "stream": "yes", "max_tokens": -1}',
                b'{"model": "tiny", "prompt": [' + b"1," * 3000 + b"], "
                b'"kv_transfer_params": {"do_remote_decode": 7}}', b'{"model": 5}', b"\xff\xfe",
            )
        )  # fmt: skip
        path = rng.choice(
            (
                b"/v1/completions",
                b"/v1/chat/completions",
                b"/instances/add",
                b"/status",
                b"/..//%00",
            )
        )
        length = rng.choice((len(body), len(body) + 50, 0, -1, 1 << 70))
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, length)
        chunked = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (
            path, rng.getrandbits(rng.choice((8, 70))),
        )  # fmt: skip
        headers = b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * rng.randrange(2000)
        return rng.choice((head + body, head, chunked + body, headers, rng.randbytes(300), b""))

    def oversized(self) -> bytes:
        """One that libzmq must cut off."""
        return bytes(MAX_FRAME_BYTES + 1 + self._rng.randrange(1 << 20))

    def _noise(self) -> bytes:
        rng = self._rng
        return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 300, 4000)))

    def _changed(self) -> bytes:
        return self._spoil(self._message())

    def _spoil(self, frame: bytes) -> bytes:
        rng, changed = self._rng, bytearray(frame)
        if rng.random() < 0.3:
            return frame[: rng.randrange(len(frame) + 1)]
        for _ in range(rng.randrange(1, 4)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    def _wrong_types(self) -> bytes:
        rng = self._rng
        tag = rng.choice(KINDS).__struct_config__.tag  # type: ignore[attr-defined]
        values = [self._value(3) for _ in range(rng.randrange(12))]
        return bytes(msgpack.packb([rng.choice((tag, "NOBODY", 7, None)), *values]))

    def _value(self, depth: int) -> Any:
        rng = self._rng
        simple: tuple[Callable[[], Any], ...] = (
            lambda: rng.choice(EDGES),
            lambda: rng.choice(WORDS),
            lambda: rng.choice((None, True, 1.5, float("inf"), b"", b"bytes")),
            lambda: rng.choice(self.epochs),
        )
        if depth and rng.random() < 0.3:
            length = rng.choice((0, 1, 3, 20))
            if rng.random() < 0.5:
                return [self._value(depth - 1) for _ in range(length)]
            return {str(number): self._value(depth - 1) for number in range(length)}
        return rng.choice(simple)()

    def _replayed(self) -> bytes:
        return self._rng.choice(self._said) if self._said else self._message()

    def _message(self) -> bytes:
        """A message of the right form, with fields that make sense, mostly."""
        kind = self._rng.choice(KINDS)
        fields = (self._field(name) for name in kind.__struct_fields__)  # type: ignore[attr-defined]
        frame = _encode(kind(*fields))
        if len(self._said) < 500:
            self._said.append(frame)
        else:
            self._said[self._rng.randrange(500)] = frame
        return frame

    def _field(self, name: str) -> Any:
        rng = self._rng
        if name in ("source_epoch", "destination_epoch"):
            right = self.epochs[name == "destination_epoch"]
            return right if rng.random() < 0.9 else rng.getrandbits(63)
        makers: dict[str, Callable[[], Any]] = {
            "seq": lambda: rng.randrange(50),
            "trailer": lambda: rng.getrandbits(62),
            "attempt": lambda: rng.randrange(3),
            "version": lambda: rng.choice((PROTOCOL_VERSION, 0, PROTOCOL_VERSION + 1, 1 << 31)),
            "retry_after": lambda: rng.choice((0.0, 0.1, 86400.0)),
            "key": lambda: TransferKey(f"fuzz-{rng.randrange(30)}", rng.choice(("", "layer"))),
            "binding": lambda: rng.choice((b"", b"b" * 16)),
            "manifest": self._manifest,
            "spec": lambda: rng.choice((None, CacheSpec(), CacheSpec(b"m", block_size=1 << 31))),
            "endpoints": lambda: rng.choice(({}, {"shm": {"token": "zz"}}, {"tcp": {}})),
            "code": lambda: "TransferRejected",
            "address": lambda: rng.choice(("127.0.0.99:7", *WORDS)),
            "reason": lambda: rng.choice(WORDS),
            "transport": lambda: rng.choice(("shm", "tcp", "x")),
        }  # fmt: skip
        return makers[name]() if name in makers else rng.choice((0, 1, 7, rng.choice(EDGES)))

    def _manifest(self) -> Manifest:
        """From a plain tensor to what no machine could hold."""
        rng = self._rng
        part = None
        if rng.random() < 0.2:
            layers, heads = rng.choice((0, 1, 4, 1 << 31)), rng.choice((0, 1, 1 << 31))
            planes = tuple(Plane(*(rng.choice(EDGES) for _ in range(5))) for _ in range(2))
            shape = PageShape(rng.choice((1, 1 << 31)), -(1 << 48), planes)
            part = Part(0, layers, rng.choice((0, 1, 1 << 31)), heads, 16, shape)
        return Manifest(
            rng.choice((0, 1, 1 << 31)),
            rng.choice((0, 1, 2, 1 << 31)),
            [
                rng.choice((0, 1, 4096, 1 << 20, 1 << 48))
                for _ in range(rng.choice((0, 1, 2, 1000)))
            ],
            rng.choice((0, 64)),
            rng.choice(("", "uint8", "nonsense")),
            [rng.choice((0, 3, 1 << 48)) for _ in range(rng.randrange(4))],
            part,
        )


def lookup(epoch: int) -> bytes:
    """Ask a directory rightly."""
    return _encode(Lookup(epoch, 0, 0))
