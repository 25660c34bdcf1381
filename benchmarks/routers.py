"""The routers that are measured side by side: how each is installed, started and watched."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.light_instance import HOST, MODEL
from benchmarks.process_tree import cpu_seconds, descendants

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "routers"
VLLM_ROUTER = "vllm-router==0.1.17"
SMG = "smg==1.13.0"
LITELLM = "litellm[proxy]==1.106.2"
_START_SECONDS = 180.0  # the Python one imports for a minute


@dataclass(frozen=True)
class Ports:
    """Where the routers and the instances listen."""

    http: int
    registration: int
    other: int
    prefill: tuple[int, ...]
    decode: tuple[int, ...]


def ensure_script(requirement: str, script: str) -> str:
    """Install a router in an environment of its own, unless it is there; return its script.

    Raises:
        subprocess.CalledProcessError: it cannot be installed.
    """
    folder = CACHE / requirement.replace("[", "-").replace("]", "")
    path = folder / "bin" / script
    if not path.exists():
        uv = [sys.executable, "-m", "uv", "--quiet"]
        subprocess.run([*uv, "venv", "--clear", str(folder)], check=True, timeout=60)
        install = [*uv, "pip", "install", "--python", str(folder / "bin" / "python"), requirement]
        subprocess.run(install, check=True, timeout=600)
    return str(path)


def ours(ports: Ports) -> list[str]:
    """Our proxy as it is by default: policies, breakers, access log, metrics, status page."""
    command = [sys.executable, "-m", "proxy", "--host", HOST, "--port", str(ports.http)]
    return [
        *command,
        *("--registration-host", HOST, "--registration-port", str(ports.registration)),
    ]


def vllm_router(ports: Ports) -> list[str]:
    """vLLM's router, with its cheapest policy; it finds the instances by the same heartbeats."""
    return [
        ensure_script(VLLM_ROUTER, "vllm-router"),
        *("--host", HOST, "--port", str(ports.http), "--policy", "round_robin"),
        *("--prometheus-port", str(ports.other), "--log-level", "warning"),
        *("--vllm-pd-disaggregation", "--vllm-discovery-address", f"{HOST}:{ports.registration}"),
    ]


def smg(ports: Ports) -> list[str]:
    """smg with a list of instances: it sends both legs at once, as its engines want it."""
    prefills = [word for port in ports.prefill for word in ("--prefill", _url(port), "none")]
    decodes = [word for port in ports.decode for word in ("--decode", _url(port))]
    return [
        ensure_script(SMG, "smg"),
        *("launch", "--host", HOST, "--port", str(ports.http), "--policy", "round_robin"),
        *("--prometheus-port", str(ports.other), "--log-level", "warn"),
        *("--pd-disaggregation", *prefills, *decodes),
    ]


def litellm(ports: Ports, folder: Path) -> list[str]:
    """LiteLLM's proxy: it knows no prefill, and sends each request to one decode instance."""
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"text-completion-openai/{MODEL}",
                "api_base": f"{_url(port)}/v1",
                "api_key": "none",
            },
        }
        for port in ports.decode
    ]
    config = folder / "litellm.yaml"  # JSON is YAML
    settings = {"dangerously_permit_weak_or_unset_master_key": True}  # as open as the others
    config.write_text(json.dumps({"model_list": models, "general_settings": settings}))
    return [
        ensure_script(LITELLM, "litellm"),
        *("--host", HOST, "--port", str(ports.http), "--config", str(config)),
        *("--num_workers", "1", "--telemetry", "False"),
    ]


class RouterProcess:
    """A command on one core, and the CPU time that it uses."""

    def __init__(self, command: Sequence[str], core: int, log: Path) -> None:
        environment = {**os.environ, "NO_PROXY": "*", "LITELLM_LOG": "ERROR"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "taskset", "-c", str(core), *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.log = log

    def cpu_seconds(self) -> float:
        """Return the processor time of all its threads and children so far."""
        return cpu_seconds(self._process.pid)

    def peak_mib(self) -> float:
        """Return the most memory that its processes have had, together."""
        return sum(_peak_kib(pid) for pid in descendants(self._process.pid)) / 1024

    def stop(self) -> None:
        """Kill it with all its children."""
        for pid in reversed(descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait(10)

    @property
    def has_ended(self) -> bool:
        """Whether it is there no more."""
        return self._process.poll() is not None


@contextlib.contextmanager
def running(
    command: Sequence[str], core: int, log: Path, ready_url: str
) -> Iterator[RouterProcess]:
    """Run a command until its first completion is answered, and kill it at the end.

    Raises:
        RuntimeError: it did not come to serve; with the end of its log.
    """
    process = RouterProcess(command, core, log)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(ready_url):
            if process.has_ended or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{command[0]} does not serve:\n{tail}")
            time.sleep(0.2)
        yield process
    finally:
        process.stop()


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answers(url: str) -> bool:
    """Whether one completion is answered."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with _direct.open(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


def _peak_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
