"""A process that forks under an engine: the child has no threads of ours, and ends all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

WAYS = ("exit", "drop it", "close the engine", "unmap its memory")
# One process forks for all ways, under an engine for each, because torch takes seconds to import.
FORKING = """
import gc, os, signal, sys, threading, warnings
from p2p_engine import EngineConfig, P2pNcclEngine


def hold(lock, held, forked):
    with lock:
        held.set()
        forked.wait()


warnings.simplefilter("ignore")  # Python 3.12 warns of any fork beside threads
config = EngineConfig(host="127.0.0.1", kv_buffer_size=2**24, mem_pool_size_gb=0.01)
for how in sys.argv[1:]:
    engine = P2pNcclEngine(config)
    landing = engine._parts.arena
    while not landing.arena.report()["prefault"].startswith(str(landing.arena.nbytes)):
        pass  # until the prefault thread waits on its condition
    held, forked = threading.Event(), threading.Event()  # the child has no thread to let go of it
    holder = threading.Thread(target=hold, args=(engine._parts.changed, held, forked))
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        if how == "close the engine":
            engine.close(0.1)
        elif how == "unmap its memory":
            landing.close()
        elif how == "drop it":
            del engine, landing
            gc.collect()
        elif how == "exit":
            sys.exit(0)
        os._exit(0)
    forked.set()
    holder.join()
    status = os.waitpid(child, 0)[1]
    print(f"{how}: {status} {engine.healthy}", flush=True)
    engine.close()
"""
# A child that lives on keeps what it was born with, whatever its parent closes.
OUTLIVED = """
import os, signal, sys, time, warnings
import torch
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.layout import TensorSource
from p2p_engine.peers.link import PeerAddress

warnings.simplefilter("ignore")
settings = {"host": "127.0.0.1", "transports": "shm", "kv_buffer_size": 2**24,
            "mem_pool_size_gb": 0.0}
receiver = P2pNcclEngine(EngineConfig(**settings))
sender = P2pNcclEngine(EngineConfig(**settings))
senders = receiver._parts.transports["shm"]._senders
source = TensorSource(torch.ones(1000))
sender.send(TransferKey("granted"), PeerAddress(receiver.zmq_address), source, ready=False)
while not receiver.stats()["live_bytes"]:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(60)
    signal.pause()
port = int(sender.zmq_address.rpartition(":")[2])
sender.close()
while senders or receiver.stats()["quarantined_bytes"]:
    time.sleep(0.01)
P2pNcclEngine(EngineConfig(port=port, **settings)).close()
receiver.close()
maps, descriptors = open(f"/proc/{child}/maps").readlines(), f"/proc/{child}/fd/"
names = (maps, [os.readlink(descriptors + name) for name in os.listdir(descriptors)])
own = [sum("p2p-kv-arena" in name for name in kept) for kept in names]
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print("free", *own)
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    """For each way, the child's status, and whether the parent's engine is healthy."""
    command = [sys.executable, "-c", FORKING, *WAYS]
    ended = subprocess.run(command, timeout=170, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(line.split(": ") for line in ended.stdout.splitlines())


@pytest.mark.parametrize("how", WAYS)
def test_a_forked_child_ends_and_the_parents_engine_goes_on(how: str, seen: dict[str, str]) -> None:
    assert seen[how] == "0 True"


def test_a_forked_child_that_lives_on_keeps_neither_the_port_nor_memory_of_a_peer() -> None:
    command = [sys.executable, "-c", OUTLIVED]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "free 2 2\n"), ended.stderr
