"""AttackStage: a real proxy before stand-in instances, and what it costs while it is attacked."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.attack.clients import Clients
from tests.attack.instances import Instances
from tests.attack.neighbours import MODEL as OTHER_MODEL
from tests.attack.strangers import Strangers
from tests.hostile.strangers import resident_bytes
from tests.processes import Child
from tests.rigs.certificates import made_certificate
from tests.rigs.proxies import ASKED
from tests.support import eventually

HOST = "127.0.0.1"
MODEL = str(ASKED["model"])
LOOK_SECONDS = 0.1
NUM_STRANGERS = 2
CLIENTS_SECONDS = 300.0
WATCHED = "tests.attack.watched"  # the proxy's own command, with a watch on its loop
# Quick to notice what happens; an attack may ask for other settings.
SETTINGS = {
    "host": HOST, "port": 0, "registration_host": HOST, "registration_port": 0,
    "probe_interval_seconds": 0.5, "shutdown_timeout_seconds": 1.0,
}  # fmt: skip


@dataclass
class Cost:
    """The most that a process had at any look, and the time of a core that it took.

    Memory is that of the process, with its file of bodies, which is not counted as its own.
    """

    rss_bytes: int = 0
    descriptors: int = 0
    cpu_seconds: float = 0.0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def look(self, stage: AttackStage) -> None:
        """Look once; a proxy that restarts is not there for a while."""
        with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            used = resident_bytes(stage.pid) + _file_bytes(stage.pid)
            self.rss_bytes = max(self.rss_bytes, used)
            self.descriptors = max(self.descriptors, len(os.listdir(f"/proc/{stage.pid}/fd")))
            self.cpu_seconds = _cpu_seconds(stage.pid)

    @contextmanager
    def of(self, stage: AttackStage) -> Iterator[None]:
        """Look again and again, in a thread."""

        def watch() -> None:
            while not self._is_over.wait(LOOK_SECONDS):
                self.look(stage)

        self._is_over.clear()
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            self.look(stage)


def _file_bytes(pid: int) -> int:
    """Return what the files take that exist in memory only."""
    folder = f"/proc/{pid}/fd"
    found = (
        os.stat(f"{folder}/{each}")
        for each in os.listdir(folder)
        if os.readlink(f"{folder}/{each}").startswith("/memfd:bodies")
    )
    # While a process is started that gets the file, too, it is there twice.
    return sum({each.st_ino: 512 * each.st_blocks for each in found}.values())


def _cpu_seconds(pid: int) -> float:
    """Return the time of a core that a process took."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def longest_turn_ms(log: str) -> float:
    """Return the longest turn of the event loop that a proxy logged, in time of a core."""
    return max((float(each) for each in re.findall(r"turn_ms=([\d.]+)", log)), default=0.0)


# All cores that this process may use; `keep_a_core_free` takes one of them from everybody else.
_CORES = os.sched_getaffinity(0)


def keep_a_core_free() -> None:
    """Keep this process, and all that it starts but proxies, off one core: as on other machines."""
    if len(_CORES) > 1:
        os.sched_setaffinity(0, _CORES - {min(_CORES)})


class ProxyProcess:
    """A proxy, which can end and start again at the same addresses. It may use every core."""

    def __init__(self, log: Path, settings: Mapping[str, Any], num_descriptors: int = 0) -> None:
        self._log = log
        self._settings = dict(settings)
        self._num_descriptors = num_descriptors
        self.start()
        self.port = int(self._shown(r"running on https?://\S+:(\d+)"))
        self.registration_address = self._shown(r"registration address=(\S+)")
        registration_port = int(self.registration_address.rpartition(":")[2])
        self._settings |= {"port": self.port, "registration_port": registration_port}

    def start(self) -> None:
        """Start it, and wait until it serves."""
        words = [
            word
            for name, value in self._settings.items()
            for word in ("--" + name.replace("_", "-"), str(value))
        ]
        limit = f"ulimit -n {self._num_descriptors}; " if self._num_descriptors else ""
        command = ["sh", "-c", limit + 'exec "$@"', "sh", sys.executable, "-m", WATCHED, *words]
        before = len(self.log())
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        os.sched_setaffinity(self.process.pid, _CORES)
        self._shown(r"running on https?://\S+:(\d+)", before)

    def stop(self) -> None:
        """End it as an operator does."""
        self.process.terminate()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        """Kill it, if it runs; idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """Return all that it has printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _shown(self, pattern: str, start: int = 0) -> str:
        found = eventually(
            lambda: re.search(pattern, self.log()[start:]), 60, f"the proxy prints {pattern}"
        )
        assert found is not None
        return found[1]


class AttackStage:
    """The proxy, its instances, and those who attack. Close it when the play is over.

    `instances` serve `MODEL`, which attackers ask for. The healthy load beside them asks for
    another model, with instances of its own, so that only the proxy is shared.

    `scale` is the share of the full numbers that is played; `count` applies it. The proxy may have
    `num_descriptors`; 0: as many as the machine gives. `by_tls`: it has a certificate.
    """

    def __init__(
        self,
        log: Path,
        scale: float = 1.0,
        settings: Mapping[str, Any] = MappingProxyType({}),
        num_descriptors: int = 0,
        by_tls: bool = False,
    ) -> None:
        self.scale = scale
        self._log = log
        self._parts = ExitStack()
        self._scheme = "https" if by_tls else "http"
        settings = {**settings, **(made_certificate(log.parent, "proxy") if by_tls else {})}
        self.proxy = ProxyProcess(log, {**SETTINGS, **settings}, num_descriptors)
        self.port = self.proxy.port
        self.instances, others = (
            self._parts.enter_context(Child(Instances, model, through=()))
            for model in (MODEL, OTHER_MODEL)
        )
        for pair in (self.instances, others):
            pair.ask("beat", self.proxy.registration_address)
        self.instances.ask("yield_to_others")
        self.wait_until_ready()
        self._free: list[Child] = []
        self._busy: list[Child] = []
        self._clients = self._parts.enter_context(Child(Clients, self.url, through=()))
        self._clients.PATIENCE = CLIENTS_SECONDS
        self._clients.wait_until_made()
        for _ in range(NUM_STRANGERS):  # their start takes a core, which an attack should have
            self.strangers()
        self.dismiss()

    def __enter__(self) -> AttackStage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The proxy's process id."""
        return self.proxy.process.pid

    @property
    def url(self) -> str:
        """The proxy's address as a client writes it."""
        return f"{self._scheme}://{HOST}:{self.port}"

    def count(self, full: int) -> int:
        """Return the share of a full number that is played; at least 2."""
        return max(2, round(full * self.scale))

    def strangers(self) -> Child:
        """Return a process of `Strangers` of one's own, until `dismiss`."""
        if not self._free:
            child = Child(Strangers, (HOST, self.port), through=())
            self._parts.callback(child.close)
            self._free.append(child)
        self._busy.append(self._free.pop())
        return self._busy[-1]

    def clients(self) -> Child:
        """Return a process of `Clients`."""
        return self._clients

    def dismiss(self) -> None:
        """Close every connection of strangers."""
        while self._busy:
            child = self._busy.pop()
            child.ask("hang_up")
            self._free.append(child)

    def get(self, path: str) -> bytes:
        """Return what the proxy answers to a GET."""
        own = ssl._create_unverified_context()
        with urllib.request.urlopen(self.url + path, timeout=30, context=own) as answer:
            content: bytes = answer.read()
            return content

    def status(self) -> dict[str, Any]:
        """Return what `/status` shows."""
        content: dict[str, Any] = json.loads(self.get("/status"))
        return content

    def metrics(self) -> dict[str, float]:
        """Return all samples by name and labels."""
        lines = self.get("/metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def log(self) -> str:
        """Return all that the proxy has printed."""
        return self.proxy.log()

    def wait_until_ready(self) -> None:
        """Wait until all instances get requests."""
        self.wait_until(lambda: self._states() == ["ready"] * 4, "all instances are ready")

    def wait_until_idle(self) -> None:
        """Wait until every count of work in progress is zero."""
        self.wait_until(self._is_idle, "every count is zero")

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = 60) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: it does not come true.
        """
        eventually(condition, timeout, what)

    def start_peer(self) -> ProxyProcess:
        """Start another proxy, which tells this one of its instances; it ends with the stage."""
        settings = {**SETTINGS, "peers": self.proxy.registration_address}
        peer = ProxyProcess(self._log.with_name(self._log.name + "-peer"), settings)
        self._parts.callback(peer.kill)
        return peer

    def close(self) -> None:
        """End everything; idempotent."""
        self.proxy.kill()
        self._parts.close()

    def _states(self) -> list[str]:
        return [instance["state"] for instance in self.status()["instances"]]

    def _is_idle(self) -> bool:
        status = self.status()
        legs = [count for i in status["instances"] for count in i["in_flight"].values()]
        assert min(legs, default=0) >= 0, "a count is negative"
        return status["requests_in_flight"] == status["requests_queued"] == 0 and not any(legs)
