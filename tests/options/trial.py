"""One changed instance of real vLLM beside a usual one: it decodes what the usual one has
prefilled, then prefills for it.

Decode's answer with KV of the other is held against what decode computes by itself, all of it with
its own options. Tokens are greedy. At each place the five likeliest tokens are told, too, so
rounding is told from difference: up to the first token that differs, both answers give the chosen
tokens the same log probabilities, but for TOLERANCE of what lies between the five. Rounding stays
far below it where both sides compute in float32. Other KV does not: the models are chaotic.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member, MemberLost
from p2p_engine.wire.request_ids import new_transfer_id
from tests.compat.workload import Question
from tests.options.table import Change
from tests.vllm.doors import post
from tests.vllm.pair import DirectPair, TokensSince, changed
from tests.vllm.pictures import Picture, chat, words

BOOT_SECONDS = 600.0  # on a machine that others use as well; alone it is half a minute
TOLERANCE = 0.02  # of the distance between the likeliest token and the fifth
LEAST_WIDTH = 1e-9
UNLIKE = 99.0  # a token that is not among the likeliest of the other answer
MOVED, REFUSED, NO_START = "moved", "refused", "no start"
WRONG, UNNAMED, FAILED = "WRONG", "UNNAMED", "FAILED"
MAX_WHY = 500  # characters
SIDES = ("decode", "prefill")
GOOD = (MOVED, REFUSED, NO_START)
LENGTHS = (33, 70, 130, 200)  # tokens: around one block, more than a window, more than six blocks
NUM_ANSWERED = 16
_ASKED = {
    "max_tokens": NUM_ANSWERED, "ignore_eos": True, "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}  # fmt: skip
_NAMED = re.compile(
    r"peer (?P<peer>\S+) is refused, and prompts are computed here: (?P<fields>.*)"
    r"|(?P<weights>weights: \S+ here, \S+ there)"
    r"|(?P<content>the peer's content is another one.*)"
    r"|computed locally: .*reason=(?P<reason>.*)"
    r"|(?P<given_up>another content \(.*\) was given up: .*)"
)
_ERROR = re.compile(
    r"(?:\w+Error|\w+Exception|error|Value error)[:,] "
    r"(?!Engine core|.*ulimit|.*validation error)(.+)"
)


def numbers(source: random.Random, model: str) -> Iterator[Question]:
    """Yield prompts of token ids."""
    for length in LENGTHS:
        prompt = [source.randrange(5, 900) for _ in range(length)]
        yield _completion(model, prompt)


def texts(source: random.Random, model: str) -> Iterator[Question]:
    """Yield prompts that each side makes tokens of."""
    for number in (10, 30):
        yield _completion(model, words(str(source.random()), number))


def images(source: random.Random, _: str) -> Iterator[Question]:
    """Yield chats with an image."""
    for across, down in ((8, 8), (5, 12)):
        text, picture = words(str(source.random()), 4), Picture(str(source.random()), across, down)
        yield chat(text, picture, **_ASKED, logprobs=True, top_logprobs=5)


PROMPTS: dict[str, Callable[[random.Random, str], Iterator[Question]]] = {
    "numbers": numbers, "texts": texts, "images": images
}  # fmt: skip


@dataclass(frozen=True)
class GreedyAnswer:
    """An answer: its tokens, and at each place the likeliest ones with their log probabilities."""

    tokens: Sequence[int]
    likely: Sequence[dict[str, float]]


def drift(own: GreedyAnswer, other: GreedyAnswer) -> float:
    """Return how far another answer is from one's own, up to the first token that differs: the
    greatest difference of a chosen token's log probability, as a share of what lies between the
    likeliest ones."""
    worst = 0.0
    for mine, yours, here, there in zip(
        own.tokens, other.tokens, own.likely, other.likely, strict=True
    ):
        width = max(here.values()) - min(here.values())
        for token in {f"token_id:{mine}", f"token_id:{yours}"}:
            if token not in here or token not in there:
                return UNLIKE
            apart = abs(here[token] - there[token])
            worst = max(worst, min(apart / max(width, LEAST_WIDTH), UNLIKE))
        if mine != yours:
            break
    return worst


def judge(drifts: Sequence[float], num_moved: int, named: str) -> str:
    """Return the outcome of one side, of which each prompt has a drift."""
    if max(drifts) > TOLERANCE:
        return WRONG
    if num_moved == len(drifts):
        return MOVED
    return REFUSED if named and not num_moved else UNNAMED


class OneSided:
    """A change, tried beside the usual instance of a fleet."""

    def __init__(self, fleet: Fleet, usual: Member, change: Change, seed: int) -> None:
        """Plan it; the seed decides the prompts."""
        self._fleet = fleet
        self._usual = usual
        self._change = change
        self._source = random.Random(f"{seed} {change.name}")

    def run(self) -> dict[str, dict[str, Any]]:
        """Boot the changed instance, ask, end it; what became of decode and of prefill."""
        name = f"{len(list(self._fleet.log_dir.glob('*.log')))}-{self._change.option}"
        other = self._fleet.start(MemberRole.BOTH, name=name, vllm_args=self._change.args)
        try:
            self._fleet.wait_ready(other, timeout=BOOT_SECONDS)
            for question in self._questions():
                self._alone(other, question)
        except (MemberLost, OSError) as error:
            if isinstance(error, MemberLost) and error.member is not other:
                raise
            return dict.fromkeys(SIDES, self._no_start(other, error))
        else:
            pairs = (self._usual, other), (other, self._usual)
            return {side: self._side(*pair) for side, pair in zip(SIDES, pairs, strict=True)}
        finally:
            self._fleet.stop(other)

    def _no_start(self, member: Member, error: Exception) -> dict[str, Any]:
        """What is said of a server that has ended, also by a prompt of its own, answers no such
        request, or is late."""
        why = _text_of(error)
        if isinstance(error, MemberLost):
            why = [str(member.process.end), *_ERROR.findall(_log_of(member))][-1]
        outcome = FAILED if isinstance(error, TimeoutError) else NO_START
        return {"outcome": outcome, "why": _short(why)}

    def _side(self, prefill: Member, decode: Member) -> dict[str, Any]:
        began_at = time.monotonic()
        before = {member: len(_log_of(member)) for member in (prefill, decode)}
        drifts, num_moved, differing = [], 0, 0
        for question in self._questions():
            tokens = TokensSince(decode)
            try:
                own = self._alone(decode, question)
                by_transfer = self._transfer(DirectPair(self._fleet, prefill, decode), question)
            except OSError as error:
                return {"outcome": FAILED, "why": _short(_text_of(error))}
            drifts.append(drift(own, by_transfer))
            differing += own.tokens != by_transfer.tokens
            num_moved += tokens["external_kv_transfer"] > 0
        named = "" if num_moved == len(drifts) else _named(prefill, decode, before)
        return {
            "outcome": judge(drifts, num_moved, named),
            "why": _short(named),
            "prompts": len(drifts),
            "moved": num_moved,
            "other_tokens": differing,
            "drift": float(f"{max(drifts):.2g}"),
            "seconds": round(time.monotonic() - began_at, 1),
        }

    def _questions(self) -> list[Question]:
        """Prompts that nobody has asked yet."""
        scene = self._change.scene
        return list(PROMPTS[scene.prompts](self._source, scene.asked_for))

    def _alone(self, member: Member, question: Question) -> GreedyAnswer:
        """Ask without a transfer; the salt keeps what was moved out of it."""
        salt = f"alone {self._source.random()}"
        return _said(member, changed(question, cache_salt=salt))

    def _transfer(self, pair: DirectPair, question: Question) -> GreedyAnswer:
        transfer_id = new_transfer_id()
        pair.ask_prefill(question, transfer_id, "PUT_ASYNC")
        return _said(pair.decode, pair.decode_leg(question, transfer_id, "PUT_ASYNC"))


def _completion(model: str, prompt: Any) -> Question:
    body = {"model": model, "prompt": prompt, "temperature": 0, "logprobs": 5, **_ASKED}
    return Question("/v1/completions", body)


def _said(member: Member, question: Question) -> GreedyAnswer:
    [choice] = json.loads(post(member.url + question.path, dict(question.body)))["choices"]
    told = choice["logprobs"]
    likely = told.get("top_logprobs") or [
        {item["token"]: item["logprob"] for item in place["top_logprobs"]}
        for place in told["content"]
    ]
    return GreedyAnswer(choice["token_ids"], likely)


def _text_of(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"{error.code}: {error.read().decode(errors='replace')}"
    return str(error)


def _short(text: str) -> str:
    return text.strip().replace(str(Path.home()), "~")[:MAX_WHY]


def _log_of(member: Member) -> str:
    return member.process.log_path.read_text(errors="replace")


def _named(prefill: Member, decode: Member, before: dict[Member, int]) -> str:
    """Return why KV did not move, by the logs. A pair that is refused is named once for both
    sides, so that is looked for from the beginning."""
    peers = {member.plan.kv_address for member in (prefill, decode) if member.plan}
    for member in (decode, prefill):
        for found in _NAMED.finditer(_log_of(member)):
            if found["peer"] in peers or (not found["peer"] and found.start() >= before[member]):
                return found[found.lastgroup or 0]
    return ""
