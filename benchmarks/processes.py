"""A contender's other half in a process of its own, called from the benchmark like an object; and
a network of its own for a benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.processes import Child

INSIDE = "P2P_BENCH_NAMESPACE"  # set where the network is ours
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--fork", "--kill-child"]


def enter_own_network(module: str) -> None:
    """Begin the benchmark again as root of a user and a network namespace, unless it is there.

    Everything in the namespaces ends with this process.
    """
    if INSIDE not in os.environ:
        command = [*UNSHARE, sys.executable, "-m", module, *sys.argv[1:]]
        os.execvpe(UNSHARE[0], command, {**os.environ, INSIDE: "1"})


class Remote(Child):
    """Makes `factory(*arguments)` in a new process, into which nothing was imported ahead."""

    PATIENCE = 120.0
    CLOSE_SECONDS = 10.0

    def __init__(
        self,
        factory: Callable[..., Any],
        *arguments: object,
        through: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, by way of `through` or in another environment if one is given, and
        wait until it is made.

        Raises:
            ChildError: making it failed, and how.
        """
        super().__init__(
            factory, *arguments, through=through, environment=environment, method="spawn"
        )
        self.wait_until_made()
