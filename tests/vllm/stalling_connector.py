"""Our connector, whose step stands still while a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_engine.connector import connector

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

STALL = "P2P_TEST_STALL"  # the variable that names the file
STALLED = ".stalled"  # the suffix of the file that says that a step stands still
LIMIT_SECONDS = 60.0


class StallingConnector(connector.P2pNcclConnector):
    """As a forward that compiles: EngineCore waits for it and reads no requests."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step, and stand still."""
        super().start_load_kv(forward_context, **kwargs)
        file = Path(os.environ[STALL])
        ends_at = time.monotonic() + LIMIT_SECONDS
        while file.exists() and time.monotonic() < ends_at:
            file.with_suffix(STALLED).touch()
            time.sleep(0.05)


P2pNcclConnector = StallingConnector  # the name that `kv_connector_module_path` asks for
