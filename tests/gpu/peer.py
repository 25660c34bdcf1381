"""An engine on the GPU in a process of its own, told what to do by lines of JSON.

It is started with an environment of its own: two ranks of NCCL on one GPU are possible when each
process says that it is another host (NCCL_HOSTID), and then they meet over the loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0"}  # fmt: skip


class GpuPeer:
    """The child, as its parent has it."""

    def __init__(self, number: int, settings: dict[str, Any]) -> None:
        """Start it; `number` is its host to NCCL."""
        environment = {**os.environ, **HOST, "NCCL_HOSTID": f"host-{number}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.peer", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.address = str(self.answer())

    def tell(self, command: str, *arguments: Any) -> None:
        """Start a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to the oldest command."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended: {self.process.poll()}"
        return json.loads(line)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run a command."""
        self.tell(command, *arguments)
        return self.answer()

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> GpuPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Serve the parent until it closes the pipe."""
    import torch

    from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey

    def pattern(seed: int, nbytes: int) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        return torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator
        )

    def say(answer: Any) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    with P2pNcclEngine(EngineConfig(**json.loads(sys.argv[1]))) as engine:
        say(engine.zmq_address)
        sent: list[Any] = []
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            if command == "send":
                seeds, nbytes, peer = arguments
                for seed, size in zip(seeds, nbytes, strict=True):
                    tensor = pattern(seed, size)
                    sent.append((tensor, engine.send_tensor(TransferKey(str(seed)), tensor, peer)))
                say(len(seeds))
            elif command == "receive":
                seeds, nbytes, peer = arguments
                wrong = 0
                for seed, size in zip(seeds, nbytes, strict=True):
                    got = engine.recv_tensor(TransferKey(str(seed)), peer, timeout=60)
                    wrong += not torch.equal(got, pattern(seed, size))
                say(wrong)
            elif command == "stats":
                say({**engine.stats(), "free_bytes": torch.cuda.mem_get_info()[0]})


if __name__ == "__main__":
    main()
