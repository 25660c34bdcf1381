"""A contender's other half in a process of its own, called from the benchmark like an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.processes import Child


class Remote(Child):
    """Makes `factory(*arguments)` in a new process, into which nothing was imported ahead."""

    PATIENCE = 120.0
    CLOSE_SECONDS = 10.0

    def __init__(
        self,
        factory: Callable[..., Any],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, in another environment if one is given, and wait until it is made.

        Raises:
            ChildError: making it failed, and how.
        """
        super().__init__(factory, *arguments, environment=environment, method="spawn")
        self.wait_until_made()
