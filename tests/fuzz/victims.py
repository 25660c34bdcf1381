"""Whom the fuzzer attacks: an engine with its directory, and a proxy, each in its own process."""

from __future__ import annotations

import http.client
import json
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.transports.shm import ShmTransport
from p2p_engine.transports.tcp import TcpTransport
from tests.doubles.server import ServerDouble
from tests.ports import free_port
from tests.processes import Child, start_fork_server
from tests.rigs.engines import settings
from tests.rigs.proxies import ASKED, LoopThread
from tests.rigs.tensors import pattern
from tests.support import eventually

CHECK_BYTES = 1 << 20
CHECK_SECONDS = 30.0
START_TRIES = 3  # a port that was free may be somebody's when the proxy binds it


class Victim:
    """What can be seen of a victim from outside."""

    pid: int

    def look(self) -> dict[str, int]:
        """Its private memory in bytes, its threads and its descriptors."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        private = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return {
            "private_bytes": int(private.split()[1]) << 10,
            "threads": len(list(Path(f"/proc/{self.pid}/task").iterdir())),
            "descriptors": len(list(Path(f"/proc/{self.pid}/fd").iterdir())),
        }


class VictimEngine:
    """The commands of an EngineVictim."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = P2pNcclEngine(config)
        ranks = [RankAddress(0, self._engine.zmq_address, self._engine.epoch)]
        self._directory = Directory(config, ranks, kv_port=0, role="D")

    def addresses(self) -> dict[str, str]:
        """All that can be dialled."""
        transports = self._engine._parts.transports
        shm, tcp = transports["shm"], transports["tcp"]
        assert isinstance(shm, ShmTransport)
        assert isinstance(tcp, TcpTransport)
        return {
            "control": self._engine.zmq_address,
            "directory": self._directory.address,
            "tcp": tcp._address,
            "shm": f"\0{shm._name}",
        }

    def stats(self) -> dict[str, Any]:
        """What the engine counts."""
        return self._engine.stats()

    def directory(self) -> tuple[bool, int]:
        """Whether it is healthy, and the bugs that it has met."""
        return self._directory.healthy, self._directory._control.errors

    def receive(self, name: str) -> bool:
        """Receive a tensor; whether it is the right one."""
        tensor = self._engine.recv_tensor(TransferKey(name), timeout=CHECK_SECONDS)
        return bool(torch.equal(tensor, pattern(name, CHECK_BYTES)))


class EngineVictim(Victim, Child):
    """An engine and a directory; honest engines in this process try whether it still works."""

    PATIENCE = 2 * CHECK_SECONDS

    def __init__(self, key_file: str) -> None:
        config = settings(
            "shm,tcp",
            key_file=key_file,
            transfer_timeout_seconds=3,
            lease_seconds=3,
            peer_timeout_seconds=2,
        )
        start_fork_server()
        super().__init__(VictimEngine, config)
        self.addresses: dict[str, str] = self.ask("addresses")
        self._honest = [
            P2pNcclEngine(settings(name, key_file=key_file, retry_seconds=0.1))
            for name in ("shm", "tcp")
        ]

    def check(self) -> None:
        """Move a tensor by each transport, and look at what the engine says of itself."""
        for honest in self._honest:
            name = secrets.token_hex(16)
            sent = honest.send_tensor(
                TransferKey(name), pattern(name, CHECK_BYTES), self.addresses["control"]
            )
            assert self.ask("receive", name)
            sent.wait(CHECK_SECONDS)
        stats = self.ask("stats")
        assert stats["healthy"], stats
        assert stats["control_errors"] == 0, stats
        assert self.ask("directory") == (True, 0)

    def close(self) -> None:
        """End all."""
        for honest in self._honest:
            honest.close()
        super().close()


class ProxyVictim(Victim):
    """A proxy before two doubles of instances that it was told of on its command line."""

    def __init__(self, key_file: str) -> None:
        self._loop, self._doubles = LoopThread(), [ServerDouble("P"), ServerDouble("D")]
        for double in self._doubles:
            self._loop.run(double.__aenter__())
        for _ in range(START_TRIES):
            self._start(key_file)
            eventually(
                lambda: self._process.poll() is not None or self._is_ready(), 60, "it is ready"
            )
            if self._process.poll() is None:
                return
        raise AssertionError("the proxy does not start")

    def _start(self, key_file: str) -> None:
        """Start the proxy; it ends if somebody else took a port meanwhile."""
        self._port, registration = free_port(), free_port()
        self.addresses = {
            "registration": f"127.0.0.1:{registration}",
            "http": f"127.0.0.1:{self._port}",
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the victim
        command = [sys.executable, "-m", "proxy", "--host=127.0.0.1", f"--port={self._port}"]
        command += ["--registration-host=127.0.0.1", f"--registration-port={registration}"]
        command += [f"--prefill={self._doubles[0].http_address}", "--client-timeout-seconds=5"]
        command += [f"--decode={self._doubles[1].http_address}", f"--key-file={key_file}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.pid = self._process.pid

    def check(self) -> None:
        """Send a request, and look for errors in the log."""
        assert self._process.poll() is None
        eventually(self._is_ready, CHECK_SECONDS, "the proxy is ready")
        body = json.dumps(ASKED).encode()
        status, answer = self._ask("/v1/completions", body)
        assert status == 200, answer
        assert json.loads(answer)["choices"]
        status, health = self._ask("/health")
        assert (status, json.loads(health)["status"]) == (200, "ok")
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]

    def _is_ready(self) -> bool:
        try:
            health = json.loads(self._ask("/health")[1])
        except (OSError, ValueError, http.client.HTTPException):
            return False
        return bool(health["prefill"] and health["decode"])

    def _ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self._port}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers), timeout=CHECK_SECONDS
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def close(self) -> None:
        """End all."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        for double in self._doubles:
            self._loop.run(double.__aexit__(None, None, None))
        self._loop.close()
        self._log.close()
