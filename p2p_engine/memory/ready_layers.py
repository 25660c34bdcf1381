"""ReadyLayers: how much of a source may be read, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_engine.memory.jobs import Moment
from p2p_engine.wire.messages import MAX_LAYERS


@dataclass
class ReadyLayers:
    """The first layers of a source that are valid, and the moments after which they are. Layers
    become valid in order, and stay so. The engine's lock guards it."""

    _marks: list[tuple[int, tuple[Moment, ...]]] = field(default_factory=list)  # in order

    @classmethod
    def whole(cls, moments: tuple[Moment, ...] = ()) -> ReadyLayers:
        """Return all layers of a source that is valid after all `moments`."""
        return cls([(MAX_LAYERS, moments)])

    def mark(self, num_layers: int, moments: tuple[Moment, ...] = ()) -> bool:
        """Note that so many layers are valid after all `moments`; returns whether that is news."""
        is_news = num_layers > (self._marks[-1][0] if self._marks else 0)
        if is_news:
            self._marks.append((num_layers, moments))
        return is_news

    def after(self, end_layer: int) -> tuple[Moment, ...] | None:
        """Return the moments after which the layers before `end_layer` are valid; None: they are
        not computed yet."""
        known = (moments for num_layers, moments in self._marks if num_layers >= end_layer)
        return next(known, None)

    def copy(self) -> ReadyLayers:
        """Return another one that says the same now."""
        return ReadyLayers(list(self._marks))
