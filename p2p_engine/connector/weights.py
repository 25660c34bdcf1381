"""The name of the weights with which this instance computes, which each content's binding has.

    CHECKPOINT → what vLLM loaded at its start: a fingerprint (checkpoint.py)
    LABELLED   → what a trainer or an operator has called them: vLLM's weight version
    UNKNOWN    → vLLM has reset its caches, as one does for new weights, or its files have changed
                 while it started, and nobody has named the weights since
    STALE      → as UNKNOWN, and vLLM's caches may have KV and pictures of weights before: its
                 workers have run a method that may change them, or a reset has failed. No label
                 counts before they are empty

Two instances exchange KV while their names are equal. An unknown name equals no other, so an
instance whose weights may be new computes each prompt itself, and says so. What comes of which
order: docs/weights.md has the table.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from p2p_engine.connector import compat
from p2p_engine.errors import ConfigError
from p2p_engine.wire.bindings import NO_NAME, no_name, short_name

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)

UNKNOWN = (
    "vLLM has reset its caches, called a method of its workers, or started while files changed, "
    "and nobody has said since which weights it has: reset the prefix cache, then label them "
    "(docs/weights.md), or set reset_keeps_weights"
)
UNNAMED = "default"  # vLLM's label, while nobody has given one
# Methods of vLLM's workers that its own engine calls, and that change no weights.
LEAVE_WEIGHTS_ALONE = frozenset({
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "compute_weight_checksums",
    "get_model_inspection", "get_encoder_timing_stats",
})  # fmt: skip


class Weights:
    """The name, and who gives it."""

    # Whether, since the start, the workers ran a method that may change weights, or took a label.
    have_changed = False

    def __init__(self, checkpoint: str, *, reset_keeps_weights: bool = False) -> None:
        """`checkpoint` names what vLLM loaded at its start; from `no_name` if nobody knows."""
        self._checkpoint = self.name = short_name(checkpoint)
        # Whether there is a name that another instance's can equal. A label may begin as no name.
        self._has_checkpoint = self.is_known = not checkpoint.startswith(NO_NAME)
        self._reset_keeps_weights = reset_keeps_weights
        # Whether vLLM's caches may have what is of weights before, which a name would call new.
        self.is_stale = False
        self._reset_encoder_cache: Callable[[], object] | None = None

    def label(self, label: str) -> bool:
        """Take a label of vLLM's; returns whether the name has changed. Nothing is named by an
        empty one, nor while the prefix cache is stale."""
        if self.is_stale:
            logger.warning(
                "the weights' label %r is not taken: vLLM's prefix cache may have KV of other "
                "weights, and its blocks are in use: reset the prefix cache, then label them again",
                label,
            )
        if self.is_stale or not label:
            return self._forget()
        name = self._checkpoint if label == UNNAMED else short_name(label)
        self.have_changed |= label != UNNAMED
        self.is_known = self._has_checkpoint or label != UNNAMED
        before, self.name = self.name, name
        if name != before:
            logger.info("weights: %s, before: %s", name, before)
        return name != before

    def reset(self, *, is_empty: bool) -> bool:
        """Note that somebody has had vLLM reset its caches, or try to, and whether the prefix cache
        is empty now; returns whether the name has changed. What vLLM has encoded of pictures and
        sounds with weights before goes with the last KV of them."""
        if self._reset_keeps_weights and not self.is_stale:
            return False
        if is_empty and self.is_stale and self._reset_encoder_cache is not None:
            self._reset_encoder_cache()
        self.is_stale = not is_empty
        return self._forget()

    def discard(self, reset_encoder_cache: Callable[[], object] | None = None) -> None:
        """Note that vLLM may have other weights from its next reset on, whatever the setting says.
        `reset_encoder_cache` is its engine core's, if that does not call it by itself."""
        self.have_changed = True
        self.is_stale = True
        self._reset_encoder_cache = reset_encoder_cache or self._reset_encoder_cache

    def _forget(self) -> bool:
        self.name, self.is_known = no_name(), False
        return True


def hear_of_weights() -> None:
    """Have each engine core of this process tell its connectors what becomes of the weights: a
    label (`weights_labelled`), a method of the workers that may have changed them
    (`weights_changed`), a sleep that throws them away (`weights_discarded`), and an adapter that
    the workers have loaded (`adapter_loaded`) or failed to load (`adapter_failed`). vLLM has no
    hooks for it. Before 0.33, a sleep that takes the KV cache's memory away is refused. Idempotent.
    """
    from vllm.v1.engine.core import EngineCore

    for name, around in _AROUND.items():
        call = getattr(EngineCore, name, None)
        if call is not None and not hasattr(call, "tells_connectors"):
            setattr(EngineCore, name, _telling(call, around))


def hear_of_resets(pool: BlockPool, tell: Callable[[bool], None]) -> None:
    """Have this block pool `tell` of each attempt to reset its prefix cache, and whether that is
    empty now, as where vLLM has none.

    vLLM tells a connector only of a reset that was asked to (`reset_connector`). Each way leads
    through the pool: the engine core's, one that the scheduler takes by itself, and one that fails,
    behind which somebody may change the weights all the same.
    """
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        is_reset = reset()
        tell(is_reset or not pool.enable_caching)
        return is_reset

    pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]


def _telling(call: Any, around: Any) -> Any:
    @functools.wraps(call)
    def wrapped(core: Any, *args: Any, **kwargs: Any) -> Any:
        with around(core, list(_connectors_of(core)), *args, **kwargs):
            return call(core, *args, **kwargs)

    wrapped.tells_connectors = True  # type: ignore[attr-defined]
    return wrapped


@contextlib.contextmanager
def _set_weight_version(_: Any, connectors: list[Any], weight_version: str) -> Iterator[None]:
    yield
    for connector in connectors:
        connector.weights_labelled(weight_version)


@contextlib.contextmanager
def _collective_rpc(
    core: Any, connectors: list[Any], method: Any, *__: Any, **___: Any
) -> Iterator[None]:
    """Trainers change weights by methods of any name, so each counts that is not known to leave
    them alone."""
    if connectors and method in ("sleep", "discard"):
        _refuse_to_sleep()
    try:
        yield
    finally:  # an update that fails may have changed some weights
        for connector in connectors if method not in LEAVE_WEIGHTS_ALONE else ():
            connector.weights_changed(core.reset_encoder_cache)


@contextlib.contextmanager
def _sleep(_: Any, connectors: list[Any], level: int = 1, mode: Any = "abort") -> Iterator[None]:
    if connectors and level > 0:
        _refuse_to_sleep()
    for connector in connectors if level > 1 else ():
        connector.weights_discarded()
    yield


@contextlib.contextmanager
def _release_kv_cache_memory(_: Any, connectors: list[Any]) -> Iterator[None]:
    if connectors:
        _refuse_to_sleep()
    yield


def _refuse_to_sleep() -> None:
    """Keep vLLM from taking memory from under transfers, which it does without a word before 0.33.

    Raises:
        ConfigError: this is such a release.
    """
    if not compat.TELLS_OF_SLEEP:
        raise ConfigError("the KV cache's memory is taken away only with vLLM 0.33 or newer")


@contextlib.contextmanager
def _add_lora(core: Any, connectors: list[Any], lora_request: Any) -> Iterator[None]:
    """Workers keep what they have of this number, unless they are told to replace it."""
    is_kept = connectors and not lora_request.load_inplace
    is_kept = is_kept and lora_request.lora_int_id in core.list_loras()
    try:
        yield  # only then are its files here, and those that were loaded
    except BaseException:
        for connector in connectors:
            connector.adapter_failed(lora_request)
        raise
    for connector in connectors if not is_kept else ():
        connector.adapter_loaded(lora_request)


# What is done around the engine core's methods of these names, which have the same arguments.
_AROUND = {
    "set_weight_version": _set_weight_version, "collective_rpc": _collective_rpc,
    "sleep": _sleep, "release_kv_cache_memory": _release_kv_cache_memory, "add_lora": _add_lora,
}  # fmt: skip


def _connectors_of(core: Any) -> Iterator[Any]:
    """Yield the connectors of an engine core's scheduler that want to be told; none while the core
    is made, or is without one."""
    scheduler = getattr(core, "scheduler", None)
    connector = scheduler.get_kv_connector() if scheduler is not None else None
    for each in (connector, *getattr(connector, "_connectors", ())):
        if hasattr(each, "weights_labelled"):
            yield each
