"""`p2p-engine doctor --pair`: asks running instances what they are, and names what differs."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from p2p_engine.cli.findings import Finding, change, note, ok, show
from p2p_engine.control.fleet_key import Secrets, read_key_file
from p2p_engine.control.plane import ControlPlane, PlaneListener
from p2p_engine.control.sockets import Route
from p2p_engine.errors import ConfigError, P2pError, PeerUnreachable, RemoteProtocolError
from p2p_engine.memory.plan import obstacles
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.identity import differences, unpack
from p2p_engine.wire.messages import Location, Lookup, decode, encode

MAX_INSTANCES = 32
ANSWER_SECONDS = 5.0
_REPEAT_SECONDS = 0.5
_STOP_SECONDS = 2.0
_ALL = 4096  # fields; more than an identity has
_WEIGHTS = (
    "they are not compared here: each prompt's KV says those it was computed with. An instance's "
    "log has `weights: …`, and the proxy's /status warns while nobody has named them"
)
_REMEDY = "docs/identity.md says what each field is, and how a difference is accepted"


def run_pairing(addresses: Sequence[str], key_file: str, console: Console) -> int:
    """Ask each instance's directory, and say of each two whether they pair; return the exit code: 1
    if some do not. Blocks for at most ANSWER_SECONDS, and for as long as it takes to stop.

    Raises:
        ConfigError: there are too few or too many addresses, or one is none; the key file cannot be
            used.
    """
    asked = list(dict.fromkeys(address.strip() for address in addresses))
    if not 2 <= len(asked) <= MAX_INSTANCES:
        raise ConfigError(f"--pair: {len(asked)} instances; 2 to {MAX_INSTANCES} can be compared")
    for address in asked:
        try:
            split_address(address)
        except ValueError as error:
            raise ConfigError(f"--pair: {error}") from None
    answers = ask_directories(asked, read_key_file(key_file))
    return show([*compare(answers), note("weights", "not compared", _WEIGHTS)], console)


def compare(answers: Mapping[str, Location | P2pError]) -> Iterator[Finding]:
    """Say who has not answered, and of each two that have, whether they pair and what differs."""
    known: dict[str, Location] = {}
    for address, answer in answers.items():
        if isinstance(answer, P2pError):
            yield change(address, str(answer), "the address is in its line `instance ready`")
        else:
            known[address] = answer
    for here, there in itertools.combinations(known, 2):
        found = _obstacles(known[here], known[there])
        who = f"{here} here, {there} there"
        if found:
            yield change(who, "\n".join(["they refuse each other", *found]), _REMEDY)
        else:
            yield ok(who, "they pair")


def _obstacles(here: Location, there: Location) -> list[str]:
    if here.spec is None or there.spec is None or here.spec.identity == there.spec.identity:
        return obstacles(here.spec, there.spec)
    try:
        ours, theirs = unpack(here.identity), unpack(there.identity)
        fields = differences(ours, theirs, at_most=_ALL) if ours and theirs else []
    except RemoteProtocolError as error:
        fields = [str(error)]
    return obstacles(here.spec, there.spec, fields=fields)


def ask_directories(addresses: Sequence[str], key: Secrets) -> dict[str, Location | P2pError]:
    """Return what each directory answers of its instance, or why it does not. Blocks for at most
    ANSWER_SECONDS."""
    asking = _Asking(addresses)
    plane = ControlPlane(
        "127.0.0.1", range(1), name="p2p-doctor", listener=asking, secrets=key,
        connect_seconds=ANSWER_SECONDS,
    )  # fmt: skip
    plane.start()
    try:
        question = encode(Lookup(secrets.randbits(62) | 1, 0, 0))
        deadline = time.monotonic() + ANSWER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and (waiting := asking.waiting()):
            for address in waiting:
                plane.send(Route(address), question)
            asking.is_over.wait(min(left, _REPEAT_SECONDS))
    finally:
        plane.close(_STOP_SECONDS)
    silent = PeerUnreachable(f"no answer within {ANSWER_SECONDS:g} s")
    return {address: asking.answers.get(address, silent) for address in addresses}


class _Asking(PlaneListener):
    """Keeps the first answer of each directory, or why there is none."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = frozenset(addresses)
        self.answers: dict[str, Location | P2pError] = {}
        self.is_over = threading.Event()

    def waiting(self) -> list[str]:
        """Return the addresses of which nothing is known yet; from any thread."""
        return [address for address in self._addresses if address not in self.answers]

    def on_frame(self, route: Route, frame: bytes) -> None:
        """Take an answer; whatever else comes is dropped."""
        try:
            message = decode(frame)
        except RemoteProtocolError:
            return
        if isinstance(message, Location):
            self._note(route.address, message)

    def on_refused(self, address: str, reason: str) -> None:
        """Note that a directory breaks our handshakes off."""
        self._note(address, PeerUnreachable(reason))

    def on_unresolved(self, address: str, error: PeerUnreachable) -> None:
        """Note that a name does not resolve."""
        self._note(address, error)

    def _note(self, address: str, answer: Location | P2pError) -> None:
        if address in self._addresses:
            self.answers.setdefault(address, answer)
        if not self.waiting():
            self.is_over.set()
