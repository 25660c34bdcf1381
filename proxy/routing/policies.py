"""Routing policies: each chooses one instance among those that can take a leg; nothing else.

CONTRIBUTING.md shows how to add one.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING

from proxy.fleet.instances import Instance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.openai.prompt import Prompt
    from proxy.routing.prefix_tree import PrefixTree

# A session's own instance is passed over when it has this many times the average load.
SESSION_OVERLOAD = 2.0


class Policy:
    """Chooses an instance for one role. `tree` tells which one holds which prompts, where kept."""

    uses_tree = False

    def __init__(self, rng: Random, tree: PrefixTree[Instance]) -> None:
        self.rng = rng
        self.tree = tree

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return one of `candidates`; there is at least one.

        They come least loaded first, then longest unused. It is called for every request, and
        never waits.
        """
        raise NotImplementedError


class LeastLoaded(Policy):
    """The fewest tokens in flight."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the first, since they come in this order."""
        return candidates[0]


class RoundRobin(Policy):
    """Each in its turn, whatever its load."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the one that was chosen longest ago."""
        return min(candidates, key=lambda instance: instance.last_turn)


class RandomChoice(Policy):
    """Any."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return one at random."""
        return self.rng.choice(candidates)


class PowerOfTwo(Policy):
    """The less loaded of two at random: several proxies do not all run to the same one."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the less loaded of two."""
        two = self.rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda instance: instance.load)


class PrefixAware(Policy):
    """Where the prompt's computation ends soonest: behind the least work, with the most held."""

    uses_tree = True

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Weigh tokens in flight against tokens that an instance need not compute again."""
        held = self.tree.match(prompt.blocks)
        return min(candidates, key=lambda i: i.load + prompt.num_new_tokens(held.get(i, 0)))


class SessionAffinity(Policy):
    """The same instance for all requests of a session, while it lives and is not overloaded."""

    def choose(self, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        """Return the first of the session's own order of the instances that is not overloaded."""
        if not prompt.session:
            return candidates[0]
        average = sum(instance.load for instance in candidates) / len(candidates)
        limit = SESSION_OVERLOAD * (average + prompt.num_tokens)
        able = [instance for instance in candidates if instance.load <= limit]
        return max(able, key=lambda instance: _rank(prompt.session, instance))


def _rank(session: str, instance: Instance) -> bytes:
    """Rank them so that one more, or one less, moves only that one's share of the sessions."""
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
