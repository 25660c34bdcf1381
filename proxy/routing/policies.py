"""Routing policies: each chooses one instance among those that can take a leg.

CONTRIBUTING.md shows how to add one.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING

from proxy.fleet.instances import Instance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.openai.prompt import Prompt
    from proxy.routing.prefix_tree import PrefixTree

# An instance with more than this many times the average load is skipped by session affinity.
SESSION_OVERLOAD = 2.0


def num_new_tokens(prompt: Prompt, instance: Instance, guessed: Mapping[Instance, int]) -> int:
    """Return the tokens of a prompt that an instance has to compute: by its blocks where it tells
    of them, else by the number of text blocks that it is guessed to hold. If it tells of some of
    its blocks only, it holds what either says."""
    sighting, guess = prompt.sighting, prompt.num_new_tokens(guessed.get(instance, 0))
    if sighting is None or instance not in sighting.held:
        return guess
    known = max(0, prompt.num_tokens - sighting.held[instance])
    return min(known, guess) if instance in sighting.partial else known


class Policy:
    """Chooses an instance for one role. `tree` maps prompts to holders if `uses_tree` is set."""

    uses_tree = False

    def __init__(self, rng: Random, tree: PrefixTree[Instance]) -> None:
        self.rng = rng
        self.tree = tree

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return one of `candidates`, a non-empty sequence.

        Candidates are sorted: least loaded first, then least recently chosen. The method is called
        for every request and must not wait.
        """
        raise NotImplementedError


class LeastLoaded(Policy):
    """Chooses the instance with the fewest tokens in flight."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the first candidate, because they are sorted by load."""
        return candidates[0]


class RoundRobin(Policy):
    """Chooses each instance in turn, regardless of load."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the least recently chosen candidate."""
        return min(candidates, key=lambda instance: instance.last_turn)


class RandomChoice(Policy):
    """Chooses at random."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return a random candidate."""
        return self.rng.choice(candidates)


class PowerOfTwo(Policy):
    """Chooses the less loaded of two random instances, so that several proxies do not pick the
    same."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the less loaded of two random candidates."""
        two = self.rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda instance: instance.load)


class PrefixAware(Policy):
    """Chooses the instance with the least work: tokens in flight plus new tokens of this prompt."""

    uses_tree = True

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the candidate with the fewest tokens in flight and left to compute, in sum."""
        held = self.tree.match(prompt.blocks)
        return min(candidates, key=lambda i: i.load + num_new_tokens(prompt, i, held))


class SessionAffinity(Policy):
    """Chooses the same instance for all requests of a session, unless it is gone or overloaded."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the session's highest-ranked candidate that is not overloaded."""
        if not prompt.session:
            return candidates[0]
        average = sum(instance.load for instance in candidates) / len(candidates)
        limit = SESSION_OVERLOAD * (average + prompt.num_tokens)
        able = [instance for instance in candidates if instance.load <= limit]
        return max(able, key=lambda instance: _rank(prompt.session, instance))


def _rank(session: str, instance: Instance) -> bytes:
    """Rank by rendezvous hashing: adding or removing an instance moves only its own sessions."""
    text = f"{session}\0{instance.identity.name}"
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()


POLICIES: dict[str, type[Policy]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
    "session_affinity": SessionAffinity,
}
