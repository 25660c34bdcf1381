"""ReplicaRule: how many instances Kubernetes would want. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from p2p_engine.cli.commands import MemberRole
from p2p_engine.errors import ConfigError

# What the controller manager of Kubernetes has by default.
TOLERANCE = 0.1
_RANGE = re.compile(r"(prefill|decode)=(\d{1,2}):(\d{1,2}):(\d{1,6}(?:\.\d+)?)", re.ASCII)


@dataclass(frozen=True)
class ReplicaRange:
    """How many instances a role may have, and how many requests in flight each of them should."""

    least: int
    most: int
    target: float


def read_ranges(text: str) -> dict[MemberRole, ReplicaRange]:
    """Read the range of each role, given as ROLE=MIN:MAX:TARGET,...; "" is no role.

    Raises:
        ConfigError: it is not of that form.
    """
    ranges = {}
    for item in text.split(",") if text else ():
        found = _RANGE.fullmatch(item.strip())
        given = ReplicaRange(int(found[2]), int(found[3]), float(found[4])) if found else None
        if not found or not given or not (1 <= given.least <= given.most and given.target > 0):
            allowed = "ROLE prefill or decode, 1 <= MIN <= MAX <= 99, and TARGET above 0"
            raise ConfigError(f"--autoscale {item!r}: not ROLE=MIN:MAX:TARGET with {allowed}")
        ranges[MemberRole(found[1])] = given
    return ranges


class ReplicaRule:
    """Decides for one role as a HorizontalPodAutoscaler does for an external metric with an average
    value, which is what KEDA makes of a trigger of the chart.

    It follows `GetExternalPerPodMetricReplicas` in replica_calculator.go, and in horizontal.go
    `stabilizeRecommendationWithBehaviors` and `recordInitialRecommendation`, all of
    pkg/controller/podautoscaler in github.com/kubernetes/kubernetes. Two limits of its rate are
    simpler here: instances are added all at once, and removed one with each decision at most.
    """

    def __init__(self, limits: ReplicaRange, window_seconds: float) -> None:
        """An instance is removed if none was wanted in its place for `window_seconds`."""
        self._limits = limits
        self._window_seconds = window_seconds
        self._proposed: deque[tuple[float, int]] = deque()  # when, and how many

    def decide(self, current: int, in_flight: float, now: float) -> int:
        """Return how many instances there should be.

        `current` counts those that are starting and leaves out those that drain; `in_flight` is the
        sum over all. `now`, in seconds, never goes back.
        """
        limits, proposals = self._limits, self._proposed
        proposed = current
        ratio = in_flight / (limits.target * current)
        if abs(1.0 - ratio) > TOLERANCE:  # in this form, it is rounded as there
            proposed = math.ceil(in_flight / limits.target)
        if not proposals:
            proposals.append((now, current))
        while proposals and proposals[0][0] <= now - self._window_seconds:
            proposals.popleft()
        proposals.append((now, proposed))
        needed = max(number for _, number in proposals)
        steady = max(proposed, min(current, needed), current - 1)
        return min(max(steady, limits.least), limits.most)
