"""The socket fuzzer: frames of every kind into every socket of a running engine and proxy.

A run is cut into slices. After each of them the victims are looked at and tried: memory is
bounded, every thread is alive, a valid transfer and a valid request succeed. What was seen is
appended as one JSON line. `python -m tests.fuzz.campaign --count 1000000 --seed 1`
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from benchmarks.harness import machine, versions
from p2p_engine.control.auth import Curve
from p2p_engine.control.fleet_key import read_key_file, write_key_file
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import Ping, Welcome, decode, encode
from tests.fuzz.frames import Frames, lookup
from tests.fuzz.victims import EngineVictim, ProxyVictim, Victim
from tests.support import eventually

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz.jsonl"
GROWTH_BYTES = (
    96 << 20
)  # of private memory, from the first slice's end on; not more with more frames
SEND_MILLISECONDS = 20_000
# Of 1000 frames; the rest goes to the engine's control port.
SHARES = {
    "directory": 120, "registration": 300, "tcp": 20, "shm": 20, "http": 20,
    "zmtp control": 6, "zmtp directory": 6, "zmtp registration": 6, "oversized": 2,
}  # fmt: skip


class Mouth:
    """A DEALER that may break whatever it says; it reads what comes back, and forgets it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, curve: Curve) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, SEND_MILLISECONDS)
        curve.dial(self.socket)
        self.socket.connect(f"tcp://{address}")

    def say(self, *frames: bytes) -> None:
        """Wait for room, then send; raises zmq.Again when the victim takes nothing any more."""
        self.socket.send_multipart(frames)
        self.drain()

    def drain(self) -> list[bytes]:
        """Return what has come back."""
        heard: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while True:
                heard.append(self.socket.recv(zmq.NOBLOCK))
        return heard


@dataclass
class Slice:
    """What was said in one slice, and what the victims looked like after it."""

    frames: Counter[str]
    seconds: float
    check_seconds: float
    victims: dict[str, dict[str, int]]


class FuzzCampaign:
    """One engine and one proxy, with keys or without, under fire."""

    def __init__(self, seed: int, *, keys: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        key_file = ""
        if keys:
            key_file = f"{self._folder.name}/fleet.key"
            write_key_file(Path(key_file))
        self._rng = random.Random(seed)
        self._curve, self._stranger = Curve(read_key_file(key_file)), Curve(())
        self._context = zmq.Context()
        self.engine, self.proxy = EngineVictim(key_file), ProxyVictim(key_file)
        self.victims: dict[str, Victim] = {"engine": self.engine, "proxy": self.proxy}
        self._addresses = {**self.engine.addresses, **self.proxy.addresses}
        self._frames = Frames(self._rng, (self._rng.getrandbits(60), self._epoch()))
        self._mouths = {
            name: [Mouth(self._context, self._addresses[name], self._curve) for _ in range(3)]
            for name in ("control", "directory", "registration")
        }
        self._barrier()
        self._base: dict[str, dict[str, int]] = {}

    def fire(self, num_frames: int) -> Slice:
        """Say so many frames, then see whether everybody is well.

        Raises:
            AssertionError: somebody is not; the message says how.
        """
        counts, began = Counter[str](), time.monotonic()
        targets = ["control", *SHARES]
        weights = [1000 - sum(SHARES.values()), *SHARES.values()]
        for number, target in enumerate(self._rng.choices(targets, weights, k=num_frames)):
            if number % 997 == 0:
                self._greet()
            self._say(target)
            counts[target] += 1
        self._barrier()
        fired = time.monotonic()
        self.engine.check()
        self.proxy.check()
        ended = time.monotonic()
        return Slice(counts, fired - began, ended - fired, self._look())

    def close(self) -> None:
        """End the victims."""
        for mouths in self._mouths.values():
            for mouth in mouths:
                mouth.socket.close()
        self.engine.close()
        self.proxy.close()
        self._context.term()
        self._folder.cleanup()

    def __enter__(self) -> FuzzCampaign:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _say(self, target: str) -> None:
        frames = self._frames
        if target in self._mouths:
            make = frames.heartbeat if target == "registration" else frames.control
            extra = [b"one more"] if self._rng.random() < 0.01 else []
            self._rng.choice(self._mouths[target]).say(*extra, make())
        elif target == "oversized":
            name = self._rng.choice(("control", "directory", "registration"))
            self._shout(name, frames.oversized())
        elif target.startswith("zmtp"):
            self._touch(target.split()[1], frames.greeting())
        else:
            self._touch(target, frames.http() if target == "http" else frames.preamble())

    def _shout(self, name: str, frame: bytes) -> None:
        mouth = Mouth(self._context, self._addresses[name], self._curve)
        mouth.say(frame)
        mouth.socket.close(linger=100)

    def _touch(self, target: str, data: bytes) -> None:
        """Say something on a bare connection; some are closed at once, some in the middle."""
        address = self._addresses[target]
        family = socket.AF_UNIX if target == "shm" else socket.AF_INET
        where: Any = address if target == "shm" else split_address(address)
        with contextlib.suppress(OSError), socket.socket(family) as bare:
            bare.settimeout(5)
            bare.connect(where)
            bare.sendall(data)
            if self._rng.random() < 0.1:
                bare.shutdown(socket.SHUT_WR)
                bare.recv(1)

    def _greet(self) -> None:
        for mouth in self._mouths["control"]:
            mouth.say(self._frames.hello())

    def _epoch(self) -> int:
        """Learn the engine's, as any peer does."""
        mouth = Mouth(self._context, self._addresses["control"], self._curve)
        mouth.say(Frames(self._rng, (7, 0)).hello())
        assert mouth.socket.poll(10_000), "no WELCOME"
        welcome = decode(mouth.socket.recv())
        assert isinstance(welcome, Welcome)
        mouth.socket.close()
        return welcome.source_epoch

    def _barrier(self) -> None:
        """Wait until every mouth's last word was heard: what answers comes in order."""
        for name, question in (("control", encode(Ping(9, 9))), ("directory", lookup(9))):
            for mouth in self._mouths[name]:
                mouth.drain()
                self._until_answered(mouth, question)

    def _until_answered(self, mouth: Mouth, question: bytes) -> None:
        """Say it again where a connection was cut for what was said before: it was lost with it."""
        say_at = 0.0

        def is_answered() -> bool:
            nonlocal say_at
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + 3.0
                mouth.socket.send(question)
            return any(_is_for(9, frame) for frame in mouth.drain())

        eventually(is_answered, 60, "the last word is heard")

    def _look(self) -> dict[str, dict[str, int]]:
        """Compare with what was seen before; descriptors and threads have some time to go."""
        seen = {}
        for name, victim in self.victims.items():
            base = self._base.setdefault(name, victim.look())
            eventually(
                lambda v=victim, b=base: (  # type: ignore[misc]
                    v.look()["threads"] <= b["threads"] + 2
                    and v.look()["descriptors"] <= b["descriptors"] + 40
                ),
                30,
                f"{name} gives back: {base}, {victim.look()}",
            )
            seen[name] = now = victim.look()
            assert now["threads"] >= base["threads"] - 2, f"{name} lost a thread: {base} {now}"
            growth = now["private_bytes"] - base["private_bytes"]
            assert growth <= GROWTH_BYTES, f"{name} grew by {growth >> 20} MiB"
        return seen


def _is_for(epoch: int, frame: bytes) -> bool:
    message = decode(frame)
    return message.destination_epoch == epoch


def run(count: int, seed: int, slice_frames: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Fire `count` frames, half of them at victims with keys; return what was seen.

    Raises:
        AssertionError: a victim is not well.
    """
    counts, slices = Counter[str](), list[dict[str, Any]]()
    for keys in (False, True):
        with FuzzCampaign(seed + keys, keys=keys) as campaign:
            left = count // 2
            for number in itertools.count(1):
                fired = campaign.fire(min(left, slice_frames))
                left -= fired.frames.total()
                counts.update(fired.frames)
                slices.append(
                    {
                        "keys": keys,
                        "frames": fired.frames.total(),
                        "seconds": round(fired.seconds, 2),
                        "check_seconds": round(fired.check_seconds, 2),
                        **fired.victims,
                    }
                )
                report(f"keys={keys} slice {number}: {slices[-1]}")
                if left <= 0:
                    break
            stats = campaign.engine.ask("stats")
            report(f"wrong messages {stats['wrong_messages']} of {stats['messages_received']}")
            slices[-1]["engine_messages_received"] = stats["messages_received"]
            slices[-1]["engine_wrong_messages"] = stats["wrong_messages"]
            slices[-1]["engine_refused_connections"] = stats["refused_connections"]
    return {"frames": counts.total(), "by_target": dict(counts), "slices": slices}


def main() -> None:
    """Run, and append the results."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.campaign", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="frames in all")
    parser.add_argument("--slice", type=int, default=25_000, help="frames between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    seen = run(options.count, options.seed, options.slice, lambda text: print(text, flush=True))  # noqa: T201
    line = {
        "command": f"make fuzz COUNT={options.count} SEED={options.seed}",
        "machine": machine(),
        "versions": versions(),
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        **seen,
    }
    with options.output.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
