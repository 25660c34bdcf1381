"""Whom the fuzzer attacks: an engine with its directory, and a proxy, each in its own process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.transports.shm import ShmTransport
from p2p_engine.transports.tcp import TcpTransport
from tests.doubles.server import ServerDouble
from tests.rigs.engines import settings, start_fork_server
from tests.rigs.proxies import ASKED
from tests.rigs.tensors import pattern
from tests.support import eventually

T = TypeVar("T")
CHECK_BYTES = 1 << 20
CHECK_SECONDS = 30.0


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


class EngineVictim(Victim):
    """An engine and a directory; honest engines in this process try whether it still works."""

    def __init__(self, key_file: str) -> None:
        config = settings(
            "shm,tcp",
            key_file=key_file,
            transfer_timeout_seconds=3,
            lease_seconds=3,
            peer_timeout_seconds=2,
        )
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.addresses: dict[str, str] = self.ask("addresses")
        self._honest = [
            P2pNcclEngine(settings(name, key_file=key_file, retry_seconds=0.1))
            for name in ("shm", "tcp")
        ]

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run a command in the victim."""
        self._pipe.send((command, arguments))
        assert self._pipe.poll(2 * CHECK_SECONDS), f"the victim does not answer: {command}"
        return self._pipe.recv()

    def check(self) -> None:
        """Move a tensor by each transport, and look at what the engine says of itself."""
        for honest in self._honest:
            name = secrets.token_hex(16)
            sent = honest.send_tensor(
                TransferKey(name), pattern(name, CHECK_BYTES), self.addresses["control"]
            )
            assert self.ask("receive", name) == "equal"
            sent.wait(CHECK_SECONDS)
        stats = self.ask("stats")
        assert stats["healthy"], stats
        assert stats["control_errors"] == 0, stats
        assert self.ask("directory") == (True, 0)

    def close(self) -> None:
        """End all."""
        for honest in self._honest:
            honest.close()
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()


def _serve(pipe: Connection, config: EngineConfig) -> None:
    with P2pNcclEngine(config) as engine:
        ranks = [RankAddress(0, engine.zmq_address, engine.epoch)]
        with Directory(config, ranks, kv_port=0, role="D") as directory:
            while True:
                try:
                    command, arguments = pipe.recv()
                except EOFError:
                    return
                pipe.send(_obey(engine, directory, command, *arguments))


def _obey(engine: P2pNcclEngine, directory: Directory, command: str, *arguments: Any) -> Any:
    if command == "addresses":
        shm, tcp = engine._parts.transports["shm"], engine._parts.transports["tcp"]
        assert isinstance(shm, ShmTransport)
        assert isinstance(tcp, TcpTransport)
        return {
            "control": engine.zmq_address,
            "directory": directory.address,
            "tcp": tcp._address,
            "shm": f"\0{shm._name}",
        }
    if command == "stats":
        return engine.stats()
    if command == "directory":
        return directory.healthy, directory._control.errors
    key = TransferKey(arguments[0])
    tensor = engine.recv_tensor(key, timeout=CHECK_SECONDS)
    return "equal" if torch.equal(tensor, pattern(arguments[0], CHECK_BYTES)) else "WRONG"


class LoopThread:
    """An event loop in a thread, for the doubles of instances behind the proxy."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CHECK_SECONDS)

    def close(self) -> None:
        """Stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class ProxyVictim(Victim):
    """A proxy before two doubles of instances that it was told of on its command line."""

    def __init__(self, key_file: str) -> None:
        self._loop, self._doubles = LoopThread(), [ServerDouble("P"), ServerDouble("D")]
        for double in self._doubles:
            self._loop.run(double.__aenter__())
        self._port, registration = _free_ports(2)
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
        eventually(self._is_ready, 60, "the proxy is ready")

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
        except (OSError, ValueError):
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


def _free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in with_ports]
    for server in with_ports:
        server.close()
    return ports
