"""Check that each file of csrc/ includes only what stands below it in LAYERS."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

LAYERS = {  # from top to bottom: NAME.c and NAME.h together, and their purpose
    "module": "the extension mempool._native",
    "movermodule": "its type Mover",
    "jobmodule": "its type Job",
    "arenamodule": "its type Arena",
    "buddymodule": "its type Buddy",
    "memorymodule": "its functions on memory, and how arguments are parsed",
    "binding": "shared by the files above; only they know Python",
    "mover": "the thread that moves bytes, as its callers see it",
    "mover_thread": "its state and its work: copies, cancels, sleeps",
    "channels": "all channels by id, both directions joined",
    "channel_send": "sends on a channel",
    "channel_receive": "receives on a channel",
    "channel": "one stream socket: the parts of both directions",
    "completions": "the jobs that ended, and their waiters",
    "expects": "the expected receives, by channel and number",
    "lanes": "the copies, which take turns lane by lane",
    "job": "one piece of the mover's work, and queues of them",
    "segment": "the frame of a stream",
    "regions": "gather and scatter lists",
    "crc32c": "the checksum",
    "copy": "copies memory past the cache",
    "arena": "host memory that other processes can map",
    "pin": "makes host memory faster for devices",
    "thread": "helper threads, conditions and deadlines",
    "buddy_check": "walks the allocator's invariants",
    "buddy": "the allocator over offsets, with handles",
    "buddy_internal": "its state",
    "space_check": "walks the free space's invariants",
    "space": "which units are free",
    "bitmap": "a set of small numbers",
}


def violations(folder: Path, layers: Iterable[str]) -> list[str]:
    """Return a line for each include that does not point down, and each file without a layer."""
    rank = {name: number for number, name in enumerate(layers)}
    paths = sorted(folder.glob("*.[ch]"))
    found = [f"{path.name} is in no layer" for path in paths if path.stem not in rank]
    for path in paths:
        for name in re.findall(r'^\s*#\s*include\s*"(.+)"', path.read_text("utf-8"), re.MULTILINE):
            above, below = path.stem, Path(name).stem
            if above != below and rank.get(above, -1) >= rank.get(below, -1):
                found.append(f"{path.name} includes {name}, which does not stand below it")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(violations(Path(__file__).parents[1] / "csrc", LAYERS)) or 0)
