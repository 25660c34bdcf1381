"""The name of the weights with which this instance computes, which each content's binding has.

    CHECKPOINT → what vLLM loaded at its start: a fingerprint (checkpoint.py)
    LABELLED   → what a trainer or an operator has called them: vLLM's weight version
    UNKNOWN    → vLLM has reset its caches, as one does for new weights, or its workers have run a
                 method that may change them, and nobody has named them since

Two instances exchange KV while their names are equal. An unknown name equals no other, so an
instance whose weights may be new computes each prompt itself, and says so. A reset before the
label, behind it, or without one: docs/weights.md has the table.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Iterator
from typing import Any

from p2p_engine.connector.checkpoint import name_of_adapter
from p2p_engine.wire.bindings import short_name

logger = logging.getLogger(__name__)

UNKNOWN = (
    "vLLM has reset its caches, or called a method of its workers, and nobody has said which "
    "weights it has now: label them (docs/weights.md), or set reset_keeps_weights"
)
UNNAMED = "default"  # vLLM's label, while nobody has given one
# Methods of vLLM's workers that its own engine calls, and that change no weights.
LEAVE_WEIGHTS_ALONE = frozenset({
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "compute_weight_checksums",
    "get_model_inspection", "get_encoder_timing_stats",
})  # fmt: skip


class Weights:
    """The name, and who gives it."""

    def __init__(self, checkpoint: str, *, reset_keeps_weights: bool = False) -> None:
        """`checkpoint` names what vLLM loaded at its start."""
        self._checkpoint = self.name = short_name(checkpoint)
        self._reset_keeps_weights = reset_keeps_weights
        self.is_known = True
        self._are_discarded = False

    def label(self, label: str) -> bool:
        """Take a label of vLLM's; returns whether the name has changed. An empty one names
        nothing."""
        if not label:
            return self._forget()
        name = self._checkpoint if label == UNNAMED else short_name(label)
        before, self.name, self.is_known = self.name, name, True
        if name != before:
            logger.info("weights: %s, before: %s", name, before)
        return name != before

    def reset(self) -> bool:
        """Note that vLLM has reset its caches; returns whether the name has changed."""
        if self._reset_keeps_weights and not self._are_discarded:
            return False
        self._are_discarded = False
        return self._forget()

    def discard(self) -> None:
        """Note that vLLM may have other weights after its next reset, whatever the setting says."""
        self._are_discarded = True

    def _forget(self) -> bool:
        self.name, self.is_known = f"unknown-{secrets.token_hex(8)}", False
        return True


def hear_of_weights() -> None:
    """Have each engine core of this process tell its connectors what becomes of the weights:
    vLLM's weight version (`weights_labelled`), a method of the workers that may have changed them
    (`weights_discarded` and `reset_cache`), and a sleep that throws them away
    (`weights_discarded`). An adapter is named when vLLM loads it, not when it is first asked for.

    vLLM has no hooks for it. Trainers change weights by methods of any name, so each counts that
    is not known to leave them alone. Idempotent.
    """
    from vllm.v1.engine.core import EngineCore

    cores: Any = EngineCore
    set_version, call_workers = cores.set_weight_version, cores.collective_rpc
    fall_asleep, load_adapter = cores.sleep, cores.add_lora
    if getattr(set_version, "tells_connectors", False):
        return

    @functools.wraps(set_version)
    def set_weight_version(core: Any, weight_version: str) -> None:
        set_version(core, weight_version)
        for connector in _connectors_of(core):
            connector.weights_labelled(weight_version)

    @functools.wraps(call_workers)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call_workers(core, method, *args, **kwargs)
        finally:  # an update that fails may have changed some weights
            if method not in LEAVE_WEIGHTS_ALONE:
                for connector in _connectors_of(core):
                    connector.weights_discarded()
                    connector.reset_cache()

    @functools.wraps(fall_asleep)
    def sleep(core: Any, level: int = 1, mode: Any = "abort") -> Any:
        for connector in _connectors_of(core) if level > 1 else ():
            connector.weights_discarded()
        return fall_asleep(core, level, mode)

    @functools.wraps(load_adapter)
    def add_lora(core: Any, lora_request: Any) -> Any:
        name_of_adapter(lora_request.lora_path, lora_request.lora_int_id)
        return load_adapter(core, lora_request)

    set_weight_version.tells_connectors = True  # type: ignore[attr-defined]
    cores.set_weight_version, cores.collective_rpc = set_weight_version, collective_rpc
    cores.sleep, cores.add_lora = sleep, add_lora


def _connectors_of(core: Any) -> Iterator[Any]:
    """Yield the connectors of an engine core's scheduler that want to be told; none while the core
    is made, or is without one."""
    scheduler = getattr(core, "scheduler", None)
    connector = scheduler.get_kv_connector() if scheduler is not None else None
    for each in (connector, *getattr(connector, "_connectors", ())):
        if hasattr(each, "weights_labelled"):
            yield each
