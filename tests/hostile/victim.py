"""An engine, a directory or a proxy's registration port in a process of its own.

`python -m tests.hostile.victim KIND` prints its address, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from p2p_engine.wire.messages import CacheSpec

KINDS = ("engine", "directory", "proxy")
LAYERS = 80


@contextlib.contextmanager
def victim(kind: str) -> Iterator[tuple[str, int]]:
    """Start one; its address and its process."""
    command = [sys.executable, "-m", "tests.hostile.victim", kind]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.stdin.close()
            process.wait(30)


def serve_engine() -> None:
    """Run an engine."""
    from p2p_engine import EngineConfig, P2pNcclEngine

    config = EngineConfig(host="127.0.0.1", kv_buffer_size=1 << 22, mem_pool_size_gb=0.001)
    with P2pNcclEngine(config) as engine:
        print(engine.zmq_address, flush=True)  # noqa: T201
        sys.stdin.read()


def serve_directory() -> None:
    """Run a directory that has much to tell."""
    from p2p_engine.config import EngineConfig
    from p2p_engine.peers.directory import Directory, RankAddress

    spec = CacheSpec(
        model="model", dtype="bfloat16", block_size=16, num_kv_heads=8, head_size=128,
        layer_cuts=(0, LAYERS), page_bytes=[65536] * LAYERS, layers=tuple(range(LAYERS)),
    )  # fmt: skip
    rank = RankAddress(0, "127.0.0.1:5", 1, spec)
    with Directory(EngineConfig(host="127.0.0.1"), [rank], kv_port=0, role="D") as directory:
        print(directory.address, flush=True)  # noqa: T201
        sys.stdin.read()


async def serve_proxy() -> None:
    """Run a proxy's registration port."""
    from tests.rigs.proxies import running_proxy

    async with running_proxy() as proxy:
        print(proxy.registration_address, flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    match sys.argv[1]:
        case "engine":
            serve_engine()
        case "directory":
            serve_directory()
        case _:
            asyncio.run(serve_proxy())
