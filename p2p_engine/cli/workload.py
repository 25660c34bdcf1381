"""A varied set of requests with all important shapes of prompts; the same for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_NUM_SPECIAL_TOKENS = 2
_WORDS = ("kalomi", "rensuta", "vone", "shidor", "pelqua", "mire", "tavone", "quashi")


@dataclass(frozen=True)
class Request:
    """One request; `num_sequences` is the number of continuations it asks for."""

    kind: str
    path: str
    body: dict[str, Any]
    num_sequences: int = 1

    @property
    def is_stream(self) -> bool:
        """Tell whether the answer is streamed."""
        return bool(self.body.get("stream"))


class Workload:
    """Makes requests for a model with this vocabulary, served under this name."""

    def __init__(self, model: str, *, vocab_size: int, block_size: int, seed: int) -> None:
        """Start the sequence of requests for this seed."""
        self._model = model
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._random = random.Random(seed)
        self._known: list[int] = []

    def requests(self, num_requests: int) -> list[Request]:
        """Return the next requests; all kinds are equally frequent."""
        return list(itertools.islice(self._endless(), num_requests))

    def _endless(self) -> Iterator[Request]:
        block = self._block_size
        kinds: dict[str, Callable[[], Request]] = {
            "short": lambda: self._completion("short", self._tokens(2, block - 1)),
            "long": self._long,
            "chat": lambda: self._chat("chat"),
            "one block": lambda: self._completion("one block", self._tokens(block, block)),
            "streamed": lambda: self._completion(
                "streamed", self._tokens(1, 8 * block), stream=True
            ),
            "several prompts": self._several,
            "blocks and one": lambda: self._completion(
                "blocks and one", self._tokens(4 * block + 1, 4 * block + 1)
            ),
            "streamed chat": lambda: self._chat("streamed chat", stream=True),
            "two choices": self._two_choices,
            "one token": lambda: self._completion("one token", self._tokens(1, 1)),
            "known prefix": self._known_prefix,
            "one token out": lambda: self._completion(
                "one token out", self._tokens(block, 4 * block), max_tokens=1
            ),
        }
        for make in itertools.cycle(kinds.values()):
            yield make()

    def _tokens(self, shortest: int, longest: int) -> list[int]:
        """Return a new prompt, as token ids."""
        length = self._random.randint(shortest, longest)
        ids = range(_NUM_SPECIAL_TOKENS, self._vocab_size)
        return self._random.choices(ids, k=length)

    def _completion(self, kind: str, prompt: Any, **settings: Any) -> Request:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._random.randint(4, 16),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **settings,
        }
        return Request(kind, COMPLETIONS, body)

    def _several(self) -> Request:
        prompts = [self._tokens(1, 4 * self._block_size) for _ in range(3)]
        request = self._completion("several prompts", prompts)
        return Request(request.kind, request.path, request.body, num_sequences=len(prompts))

    def _two_choices(self) -> Request:
        """Use top_k=1 for greedy sampling: vLLM needs n > 1 sampled, and its CPU runner fails on
        chunked seeds."""
        settings = {"n": 2, "temperature": 1.0, "top_k": 1}
        prompt = self._tokens(self._block_size, 6 * self._block_size)
        request = self._completion("two choices", prompt, **settings)
        return Request(request.kind, request.path, request.body, num_sequences=2)

    def _long(self) -> Request:
        self._known = self._tokens(20 * self._block_size, 40 * self._block_size)
        return self._completion("long", self._known)

    def _known_prefix(self) -> Request:
        """Start like an earlier prompt, which both instances may still have cached."""
        head = self._known[: self._random.randint(0, 20 * self._block_size)]
        return self._completion(
            "known prefix", head + self._tokens(1, 2 * self._block_size), stream=True
        )

    def _chat(self, kind: str, **settings: Any) -> Request:
        words = self._random.choices(_WORDS, k=self._random.randint(1, 60))
        body = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": " ".join(words)},
            ],
            "max_completion_tokens": self._random.randint(4, 16),
            "temperature": 0,
            "return_token_ids": True,
            **settings,
        }
        return Request(kind, CHAT, body)
