"""Our connector, in a worker that cannot reload weights while a file is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from p2p_engine.connector import connector

BROKEN = "P2P_TEST_BROKEN_RELOAD"  # the variable that names the file
_inner = Worker.reload_weights


def _reload_weights(worker: Any, *args: Any, **kwargs: Any) -> None:
    if Path(os.environ[BROKEN]).exists():
        raise OSError("the weights cannot be read")
    _inner(worker, *args, **kwargs)


Worker.reload_weights = _reload_weights  # type: ignore[method-assign, assignment]
P2pNcclConnector = connector.P2pNcclConnector  # the name that `kv_connector_module_path` asks for
