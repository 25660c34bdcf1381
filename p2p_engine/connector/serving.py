"""Finds the HTTP server of a rank, in each of vLLM's data-parallel modes (docs/configuration.md).

vLLM's engine core sets only `data_parallel_index` (over all hosts) and `data_parallel_rank_local`
(on this host). With a dense model it does not keep the sizes.
"""

from __future__ import annotations

import ipaddress
import logging
import multiprocessing
import re
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]  # vLLM requires it

from p2p_engine.peers.directory import Server
from p2p_engine.wire.addresses import join_address

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig

    from p2p_engine.config import EngineConfig

logger = logging.getLogger(__name__)

# The name that vLLM's supervisor gives a rank's server with --data-parallel-multi-port-external-lb.
_SUPERVISED = re.compile(r"APIServer_DPRank_(\d+)")
_LOOKS_BEFORE_WARNING = 20  # one for each heartbeat


def find_server(
    parallel: ParallelConfig, transfer: KVTransferConfig, config: EngineConfig
) -> Server:
    """Find the server of the rank whose engine core this process is."""
    host = config.http_host or config.host
    number = supervised_rank()
    if number is not None and config.http_port:
        return Server(SupervisedServer(host, config.http_port, number).address)
    if not is_one_of_many(parallel, transfer) or parallel.data_parallel_external_lb:
        return Server(lambda: join_address(host, config.http_port))
    if parallel.data_parallel_hybrid_lb:  # its server has the ranks of this host only
        return Server(
            lambda: join_address(host, config.http_port), parallel.data_parallel_rank_local
        )
    master = str(parallel.data_parallel_master_ip)
    if not config.http_host and not _is_loopback(master):
        host = master  # the one server of all ranks: those of other hosts are headless
    return Server(lambda: join_address(host, config.http_port), parallel.data_parallel_index)


def is_one_of_many(parallel: ParallelConfig, transfer: KVTransferConfig) -> bool:
    """Whether this is one of several data-parallel ranks.

    A dense model's `data_parallel_size` is 1 by now. vLLM's own processes then have the rank in
    the engine's id; actors of Ray, which serves data-parallel ranks only if it is asked to, do not.
    """
    return (
        parallel.data_parallel_size > 1
        or parallel.data_parallel_index > 0
        or parallel.data_parallel_backend == "ray"
        or re.search(r"_dp\d+$", transfer.engine_id or "") is not None
    )


def supervised_rank() -> int | None:
    """Return this rank's number if a supervisor started a server for it alone, else None."""
    parent = multiprocessing.parent_process()
    match = _SUPERVISED.fullmatch(parent.name) if parent is not None else None
    return int(match[1]) if match else None


class SupervisedServer:
    """The server of one of a host's ranks that each have a port, counted from the first one's.

    Only the supervisor knows which rank of the host this is. Our server is the process that started
    this one, so the port is the one of the range on which that process listens, once it does.
    """

    def __init__(self, host: str, first_port: int, number: int) -> None:
        """`number` is the rank's over all hosts, so no less than on this one."""
        self._host = host
        self._ports = range(first_port, first_port + number + 1)
        self._found = ""
        self._num_looks = 0

    def address(self) -> str:
        """Return the server's address; empty while it does not listen. Reads a few files of
        /proc."""
        if not self._found:
            ports = sorted(_listening_ports().intersection(self._ports))
            if len(ports) == 1:
                self._found = join_address(self._host, ports[0])
            self._warn(ports)
        return self._found

    def _warn(self, ports: list[int]) -> None:
        self._num_looks += 1
        if not self._found and self._num_looks == _LOOKS_BEFORE_WARNING:
            logger.error(
                "not registered: of the ports %s to %s, this rank's server listens on %s; "
                "http_port must be vLLM's --port, the same for all ranks of a host",
                self._ports[0], self._ports[-1], ports or "none",
            )  # fmt: skip


def _listening_ports() -> set[int]:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return set()
    try:
        sockets = psutil.Process(parent.pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {item.laddr.port for item in sockets if item.status == psutil.CONN_LISTEN}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
