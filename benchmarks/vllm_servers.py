"""Real vLLM servers for benchmarks: each on a core of its own, asked over a Unix socket, so that
HTTP goes beside any link that is measured."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2p_engine.cli.tiny_model import TinyModel

MODEL = TinyModel(num_layers=16, num_heads=8, num_kv_heads=8)
BYTES_PER_TOKEN = MODEL.kv_bytes_per_token(element_bytes=4)
BLOCK_TOKENS = 32
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 600.0, 300.0, 30.0
# Before Python starts: nothing may pin the worker to the core that NixlConnector chooses.
UNPINNED = "import os\nos.sched_setaffinity = lambda pid, cores: None\n"


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def p2p_settings(role: str, kv_port: int, **extra: Any) -> dict[str, Any]:
    """Return the --kv-transfer-config of our connector, with these settings of its own."""
    return {
        "kv_connector": "P2pNcclConnector", "kv_role": role, "kv_port": kv_port,
        "kv_connector_extra_config": {"host": "127.0.0.1", **extra},
    }  # fmt: skip


def nixl_environment(folder: Path, port: int, *, is_pinned: bool) -> dict[str, str]:
    """Return the variables of an instance with NixlConnector. It pins its worker to the last core
    of the machine; without `is_pinned` a file in `folder` keeps it from that."""
    found = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)
    }  # fmt: skip
    if not is_pinned:
        (folder / "sitecustomize.py").write_text(UNPINNED)
        found["PYTHONPATH"] = str(folder)
    return found


class OneCoreServer:
    """One vLLM server on one core."""

    def __init__(
        self,
        name: str,
        folder: Path,
        core: int,
        transfer: Mapping[str, Any] | None = None,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with `transfer` as its --kv-transfer-config; `wait` waits for it."""
        self.kv_port: int = (transfer or {}).get("kv_port", 0)
        self.path = folder / f"{name}.socket"
        self._log = (folder / f"{name}.log").open("w")
        own = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": str(core),
            **(environment or {}),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL.path),
            "--served-model-name", "m", "--uds", str(self.path), "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "8192", "--max-num-batched-tokens", "8192",
            "--block-size", str(BLOCK_TOKENS), *arguments,
        ]  # fmt: skip
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self._process = subprocess.Popen(
            command, env=own, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """The process that has started all others of this server."""
        return self._process.pid

    def wait(self) -> None:
        """Block until it answers.

        Raises:
            RuntimeError: it has ended, or did not answer in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = UnixConnection(self.path)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start, see {self._log.name}")

    def ask(self, prompt: list[int], params: dict[str, Any]) -> int:
        """Return the first token after a prompt; blocks."""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "kv_transfer_params": params,
        }  # fmt: skip
        connection = UnixConnection(self.path)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text[:300]!r}")
        [token] = json.loads(text)["choices"][0]["token_ids"]
        return int(token)

    def close(self) -> None:
        """End the server and all that it has started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
