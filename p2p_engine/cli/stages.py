"""The stage of a starting instance, and why no proxy takes it, read from its log."""

from __future__ import annotations

import re
from pathlib import Path

STARTING = "starting"
READY = "ready"

# vLLM 0.29 to 0.33: a text in the log that ends one step, and the name of the next step.
_STAGES = (
    ("non-default args", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "allocating the KV cache"),
    ("KV cache size", "warming up"),
    ("init engine", "starting the HTTP server"),
    ("Application startup complete", "waiting for the first answer"),
)
# What p2p_engine/peers/directory.py says of a proxy.
_REFUSED = re.compile(r"not registered: (proxy .+)")
_TAKEN_AFTER_ALL = "no longer refused: proxy "


class StageReader:
    """Follows one log; each call reads only the new part."""

    def __init__(self, log_path: Path) -> None:
        """Follow this file, which may not exist yet."""
        self._path = log_path
        self._position = 0
        self._partial = ""
        self._next = 0
        self.stage = STARTING
        self.refusal = ""  # why a proxy does not take the instance

    def update(self) -> str:
        """Return the latest stage in the log; stages only advance."""
        for line in self._new_lines():
            if refused := _REFUSED.search(line):
                self.refusal = refused[1].strip()
            elif _TAKEN_AFTER_ALL in line:
                self.refusal = ""
            for number in range(self._next, len(_STAGES)):
                if _STAGES[number][0] in line:
                    self.stage = _STAGES[number][1]
                    self._next = number + 1
        return self.stage

    def _new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as log:
                log.seek(self._position)
                added = log.read()
        except FileNotFoundError:
            return []
        self._position += len(added)
        *lines, self._partial = (self._partial + added.decode(errors="replace")).split("\n")
        return lines
