"""Adapters: the LoRA weights that a request names, and whether KV of them is exchanged.

An adapter is named once, when vLLM's workers have loaded it: by a digest of what they have loaded.
What cannot be named, or may be something else by the time that its KV is promised, is computed by
each instance, which says why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_engine.connector import compat
from p2p_engine.wire.bindings import no_name

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # first come first
MAX_LOADED = 4096
READ_BYTES = 1 << 20
# Why requests for an adapter are computed here, each behind "the adapter ...".
UNLOADED = "was used before anybody loaded it, or could not be loaded"
IN_PLACE = "was loaded in place of another one"
CHANGED = "has other files than were loaded"
MIXED = "may have been another one, of which vLLM still has KV"

Stamps = tuple[object, ...]


@dataclass
class _LoadedAdapter:
    """One that vLLM's workers have loaded. With an obstacle, its name equals no other."""

    path: str
    obstacle: str = ""
    name: str = field(default_factory=no_name)
    files: tuple[str, ...] = ()
    stamps: Stamps = ()

    def look(self, path: str) -> str:
        """Note if the workers may have loaded something else by now, since they forget the adapters
        used least: other files, or from the path of another request. Returns the obstacle."""
        if not self.obstacle and (path != self.path or _stamps(self.files) != self.stamps):
            self.obstacle = CHANGED
        return self.obstacle


class Adapters:
    """The adapters of one instance, by the numbers that vLLM gives them."""

    def __init__(self) -> None:
        self._loaded: dict[int, _LoadedAdapter] = {}  # those used last come last
        # Of what vLLM's prefix cache has KV, by what it tells adapters apart by; None: of several.
        self._cached: dict[object, str | None] = {}

    def note_load(self, adapter: LoRARequest) -> None:
        """Name what vLLM's workers have loaded just now; blocks while all of it is read."""
        number, now = adapter.lora_int_id, _read(adapter)
        if now.obstacle:
            logger.warning("the adapter %r %s", adapter.lora_name, now.obstacle)
        self._loaded.pop(number, None)
        self._loaded[number] = now
        if len(self._loaded) > MAX_LOADED:
            del self._loaded[next(iter(self._loaded))]

    def forget(self, adapter: LoRARequest) -> None:
        """Note that the workers may have a part of what they were to load."""
        self._loaded.pop(adapter.lora_int_id, None)

    def name_of(self, request: Request) -> str:
        """Return a name for the weights of a request's adapter; empty if it has none."""
        return self._of(request.lora_request).name if request.lora_request is not None else ""

    def obstacle_to(self, request: Request, bound_to: str = "") -> str:
        """Return why KV of a request's adapter is not exchanged; empty if it may be. `bound_to` is
        the name that the request's KV has, if any.

        Call this for each request, also for those without a transfer: vLLM caches their KV.
        """
        adapter = request.lora_request
        if adapter is None:
            return ""
        loaded = self._of(adapter)
        obstacle = IN_PLACE if adapter.load_inplace else loaded.look(adapter.lora_path)
        name, place = None if obstacle else loaded.name, compat.cached_by(request)
        if self._cached.setdefault(place, name) != name:
            self._cached[place] = None
        if not obstacle and bound_to not in ("", name):
            obstacle = IN_PLACE
        if not obstacle and self._cached[place] is None:
            obstacle = MIXED
        return obstacle and f"the adapter {adapter.lora_name!r} {obstacle}"

    def reset(self) -> None:
        """Note that vLLM's prefix cache is empty."""
        self._cached.clear()

    def _of(self, adapter: LoRARequest) -> _LoadedAdapter:
        loaded = self._loaded.pop(adapter.lora_int_id, None)
        if loaded is None:
            return _LoadedAdapter(adapter.lora_path, UNLOADED)
        self._loaded[adapter.lora_int_id] = loaded
        return loaded


def _read(adapter: LoRARequest) -> _LoadedAdapter:
    """Name an adapter by its weights' bytes, and by its settings. No file makes this raise."""
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        if getattr(adapter, "tensorizer_config_dict", None):  # before 0.32
            raise ValueError("its weights are not in its folder")
        folder = Path(get_adapter_absolute_path(adapter.lora_path))
        weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), folder)
        # The hub's cache says in refs/main which of its folders vLLM loads.
        others = (folder / "adapter_config.json", folder / "../../refs/main")
        files = tuple(map(str, (weights, *others)))
        stamps = _stamps(files)
        digest = hashlib.blake2b(_settings(adapter, folder).encode(), digest_size=16)
        with weights.open("rb") as opened:
            while piece := opened.read(READ_BYTES):
                digest.update(piece)
    except Exception as error:  # noqa: BLE001 - of whatever vLLM's own reading raises
        return _LoadedAdapter(adapter.lora_path, f"cannot be read: {error!r:.200}")
    return _LoadedAdapter(adapter.lora_path, "", digest.hexdigest(), files, stamps)


def _settings(adapter: LoRARequest, folder: Path) -> str:
    """Return what this vLLM reads of an adapter's settings, less what is as if it were not given:
    so a release that knows more of them agrees. The weights' names say what `target_modules` do."""
    from vllm.lora.peft_helper import PEFTHelper

    helper: Any = PEFTHelper.from_local_dir(str(folder), None)
    told = {"is_3d": adapter.is_3d_lora_weight}
    for item in dataclasses.fields(helper):
        value = getattr(helper, item.name)
        if value and value != item.default and item.name != "target_modules":
            told[item.name] = value
    return repr(sorted(told.items()))


def _stamps(files: Iterable[str]) -> Stamps:
    """Return what changes when one of some files is written, replaced, made or removed."""
    stamps = list[object]()
    for file in files:
        try:
            told = os.stat(file)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((told.st_size, told.st_mtime_ns, told.st_ctime_ns, told.st_ino))
    return tuple(stamps)
