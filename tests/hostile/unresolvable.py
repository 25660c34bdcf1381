"""What a process does when names are not resolved: run it with the resolver of unresolvable.c.

Threads that hang in the resolver end with the process, which is to be killed.
"""

from __future__ import annotations

from typing import Any

import torch
import zmq

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import P2pError
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import InstanceAddress, PeerAddress
from p2p_engine.wire.messages import decode_heartbeat
from tests.rigs.engines import engines, settings, start

BAD = "prefill-7.nodns:4567"
PATIENCE = 60.0


def exchange(sender: P2pNcclEngine, peer: PeerAddress, name: str) -> str:
    """Send a tensor; return how that ended."""
    try:
        sender.send(TransferKey(name), peer, TensorSource(torch.arange(8))).wait(PATIENCE)
    except P2pError as error:
        return f"{type(error).__name__} {error}"
    return "ok"


def by_name(engine: P2pNcclEngine) -> PeerAddress:
    """The address of an engine, with a name for its host."""
    return PeerAddress("localhost:" + engine.zmq_address.rpartition(":")[2])


class Unresolving:
    """The commands: each returns what was seen of a name, by its part in the play."""

    def try_engines(self) -> dict[str, Any]:
        """A healthy pair, beside names of peers and of directories that nobody resolves."""
        seen: dict[str, Any] = {}
        with engines(3, "tcp") as (sender, receiver, late):
            target = PeerAddress(receiver.zmq_address)
            seen["good name"] = exchange(sender, by_name(receiver), "by name")
            bad = sender.send(TransferKey("bad"), PeerAddress(BAD), TensorSource(torch.arange(8)))
            ranked = sender.receive(TransferKey("ranked"), TensorSink(), peer=PeerAddress(BAD, 1))
            behind = sender.receive(TransferKey("behind"), TensorSink(), peer=InstanceAddress(BAD))
            endings = {exchange(sender, target, f"beside {number}") for number in range(20)}
            seen["healthy pair"] = endings
            crowd = [
                sender.send(
                    TransferKey(f"crowd {number}"),
                    PeerAddress(f"p{number}.nodns:1"),
                    TensorSource(torch.arange(8)),
                )
                for number in range(100)
            ]
            seen["beside a crowd"] = exchange(sender, target, "beside a crowd")
            seen["known name beside a crowd"] = exchange(sender, by_name(late), "by name again")
            for name, transfer in (
                ("bad peer", bad),
                ("bad rank", ranked),
                ("bad instance", behind),
            ):
                try:
                    transfer.wait(PATIENCE)
                except P2pError as error:
                    seen[name] = f"{type(error).__name__} {error}"
            ends = set()
            for transfer in crowd:
                try:
                    transfer.wait(PATIENCE)
                except P2pError as error:
                    ends.add(type(error).__name__)
            seen["crowd"] = ends
        return seen

    def try_directory(self) -> dict[str, Any]:
        """Two proxies, one by a name that nobody resolves."""
        seen: dict[str, Any] = {}
        context = zmq.Context()
        proxy = context.socket(zmq.ROUTER)
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        config = settings(
            "tcp", proxy_ip="127.0.0.1,proxy-2.nodns", proxy_port=port, http_port=8100
        )
        with start(config) as sender, start(config) as receiver:
            ranks = [RankAddress(0, receiver.zmq_address, receiver.epoch)]
            with Directory(config, ranks, kv_port=0, role="D") as directory:
                heard = 0
                while heard < 3 and proxy.poll(int(PATIENCE * 1000)):
                    decode_heartbeat(proxy.recv_multipart()[-1])
                    heard += 1
                seen["heartbeats"] = heard
                seen["rank"] = exchange(sender, PeerAddress(directory.address, 0), "by directory")
        proxy.close()
        context.term()
        return seen
