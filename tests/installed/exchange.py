"""Two processes, one tensor. It runs where the wheel is installed, and knows no other test."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey

SECONDS = 60.0
KEY = TransferKey("request-1", "layers.0")


def _engine() -> P2pNcclEngine:
    return P2pNcclEngine(EngineConfig(kv_buffer_size=1 << 26, mem_pool_size_gb=0.1))


def _tensor() -> torch.Tensor:
    return torch.arange(1 << 20, dtype=torch.int32).view(torch.bfloat16).reshape(1024, -1)


def send(pipe: Connection) -> None:
    """The other process: send to the address that comes, and stay until it is received."""
    with _engine() as engine:
        pipe.send(engine.zmq_address)
        transfer = engine.send_tensor(KEY, _tensor(), pipe.recv())
        transfer.wait(timeout=SECONDS)
        pipe.recv()


def main() -> None:
    """Receive what the other process sends, and compare."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=send, args=(theirs,))
    sender.start()
    with _engine() as engine:
        peer = ours.recv()
        ours.send(engine.zmq_address)
        received = engine.recv_tensor(KEY, peer, timeout=SECONDS)
        assert torch.equal(received.view(torch.int32), _tensor().view(torch.int32))
    ours.send("received")
    sender.join(SECONDS)
    assert sender.exitcode == 0
    print("a tensor of", received.nbytes, "bytes has come from another process")  # noqa: T201


if __name__ == "__main__":
    main()
