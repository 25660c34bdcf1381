"""A process that forks under an engine: the child has no threads of ours, and ends all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKING = """
import gc, os, signal, sys, warnings
from p2p_engine import EngineConfig, P2pNcclEngine

warnings.simplefilter("ignore")  # Python 3.12 warns of any fork beside threads
engine = P2pNcclEngine(EngineConfig(host="127.0.0.1", kv_buffer_size=2**24, mem_pool_size_gb=0.01))
while not engine._arena.arena.report()["prefault"].startswith(str(engine._arena.arena.nbytes)):
    pass  # until the prefault thread waits on its condition
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that hangs
    how = sys.argv[1]
    if how == "close the engine":
        engine.close(0.1)
    elif how == "unmap its memory":
        engine._arena.close()
    elif how == "drop it":
        del engine
        gc.collect()
    elif how == "exit":
        sys.exit(0)
    os._exit(0)
status = os.waitpid(child, 0)[1]
healthy = engine.healthy
engine.close()
sys.exit(status or not healthy)
"""


@pytest.mark.parametrize("how", ["exit", "drop it", "close the engine", "unmap its memory"])
def test_a_forked_child_ends_and_the_parents_engine_goes_on(how: str) -> None:
    ended = subprocess.run([sys.executable, "-c", FORKING, how], timeout=120, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
