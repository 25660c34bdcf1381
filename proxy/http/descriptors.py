"""Descriptors: how many this process may have, and who gets how many of them."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

from p2p_engine.errors import ConfigError

logger = logging.getLogger(__name__)

# What a limit without end counts as.
MANY = 1 << 20
# Listening sockets, the log, files, and newcomers who are told that there is no room.
OWN = 160
# The registration port takes a quarter of all, but no more than this (p2p_engine/control/auth.py).
MAX_REGISTRATION = 4096
FEWEST = 16


def raised_limit() -> int:
    """Raise this process's soft limit on descriptors to its hard one; return and log it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logger.info("descriptors limit=%s before=%s", _said(hard), _said(soft))
    return MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)


@dataclass(frozen=True)
class Shares:
    """How many connections there may be: of clients, and to instances for requests.

    What is left is for the registration port, for probes, and for the process itself.
    """

    clients: int
    upstream: int

    @classmethod
    def of(
        cls, num_descriptors: int, max_connections: int, max_requests: int, max_instances: int
    ) -> Shares:
        """Divide descriptors. A request has two connections to instances at the most.

        Raises:
            ConfigError: there are too few.
        """
        registration = min(MAX_REGISTRATION, num_descriptors // 4)
        probes = min(max_instances, num_descriptors // 8)
        rest = num_descriptors - registration - probes - min(OWN, num_descriptors // 4)
        upstream = min(2 * max_requests, rest * 2 // 3)
        clients = rest - upstream
        if clients < FEWEST:
            raise ConfigError(
                f"{num_descriptors} descriptors (ulimit -n) leave {clients} for clients; "
                f"at least {FEWEST} are needed"
            )
        return cls(min(max_connections, clients), upstream)


def _said(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
