"""Layer hooks: which layers of a forward are done, as vLLM tells after each attention layer.

A layer is done if all layers before it in its group are, and its hook was called once, in the
thread that runs the step. What has no hook, as in whole replayed graphs, is done after the forward.
vLLM's micro-batches run in threads of their own, each with hooks for its share of the tokens: no
call of theirs counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from p2p_engine.connector.sends import Sends

logger = logging.getLogger(__name__)


class LayerHooks:
    """The progress of one rank's forward, by group of layers."""

    def __init__(self, sends: Sequence[Sends]) -> None:
        self._places = {
            name: (item, place) for item in sends for place, name in enumerate(item.layer_names)
        }
        self._sends = sends
        self._num_done: dict[Sends, int] = {}
        self._thread = 0
        self._is_reliable = bool(self._places)
        self.is_open = False  # a hook that is called now may let something leave

    def open(self) -> None:
        """Begin a forward, in the thread that runs it."""
        self._thread = threading.get_ident()
        self._num_done.clear()
        self.is_open = self._is_reliable and any(item.leaves_by_layer for item in self._sends)

    def close(self) -> None:
        """End the forward: no hook counts until the next one."""
        self.is_open = False

    def layer_done(self, name: str) -> None:
        """Note that a layer's KV is computed, for all tokens of the step."""
        if threading.get_ident() != self._thread:
            self.is_open = False
        sends, place = self._places.get(name, (None, 0))
        if sends is None or not self.is_open:
            return
        num_done = self._num_done.get(sends, 0)
        if place == num_done:
            self._num_done[sends] = num_done + 1
            sends.layers_done(num_done + 1)
        elif place < num_done:  # it may have been read before it was written again
            logger.error("layer %s ran twice in a step; nothing leaves by layer any more", name)
            self._is_reliable = self.is_open = False
            for item in self._sends:
                item.lose_step(f"layer {name} ran twice in a step")
