"""A round of turns: one process promises KV and another one claims it, with a fault in between or
at a step of either, beside a bystander who has nothing to do with it and must be served."""

from __future__ import annotations

import time
from typing import Any

from tests.chaos.faults import Fault, FaultScene
from tests.chaos.parent import ChaosChild
from tests.chaos.round import END_SECONDS, PROBE_SECONDS, REST_SECONDS, Round
from tests.chaos.steps import CLAIM, EVICT, NEEDLESS, PRESS, RECALL, SPARE, STASHED, TWICE, Step
from tests.chaos.turns import CUTS, NUM_BLOCKS, NUM_KEPT_BACK, NUM_LAYERS

PAGE_BYTES = [64, 4096, 20480]  # of one block of one layer
NUM_OTHERS, OTHER_BYTES = 3, 100_000


class TurnRound(Round):
    """The survivor is the victim's peer, or the bystander if the fault kills both."""

    def __init__(
        self, number: int, transport: str, fault: Fault, step: Step, survivor: ChaosChild, seed: int
    ) -> None:
        super().__init__(number, transport, fault, step, survivor, seed)
        is_spare = step.work == SPARE
        self._page_bytes = self._random.choice(PAGE_BYTES)
        # Of its first blocks, a claimer has so many, and two prompts of a session share so many.
        self._num_known = self._random.choice([NUM_KEPT_BACK, 13] if is_spare else [0, 4])
        self._end = self._random.choice(CUTS[1:]) if step.work in STASHED else NUM_BLOCKS
        self._is_kept = step.event.endswith("RENEW") or self._random.random() < 0.5
        self.result.mode = "GET" if step.work in STASHED else "PUT_ASYNC"
        self.result.nbytes = (self._end - self._num_known) * NUM_LAYERS * self._page_bytes
        self._num_lost = 0  # of others' transfers, since all were served

    def _play(self, scene: FaultScene) -> None:
        self._fresh = self._bystander = ChaosChild(self.result.transport)
        if self._fault.kills_both:
            self._bystander, scene.survivor = scene.survivor, self._fresh
        super()._play(scene)

    def _end_all(self, scene: FaultScene) -> None:
        super()._end_all(scene)
        for process in (self._fresh, scene.survivor):
            if process is not self._survivor:
                process.close()

    # The play

    def _begin(self, scene: FaultScene) -> None:
        sender, receiver = self._roles(scene)
        work = self._step.work
        if self._fault.needs_relays:
            scene.survivor.ask("spare", self._bystander.ask("epoch"))
        self._serve_all_others(scene, "before")
        if self._step.is_promise:
            scene.victim.ask("trap", self._step.event)
        self._promise(scene, work, self._names)
        if not self._step.is_promise:
            sender.ask("await_promises")
            scene.victim.ask("trap", self._step.event)
        if work == EVICT:
            sender.ask("evict")
        self._claim(scene, receiver, work, self._names)
        if work == TWICE:
            self._claim(scene, self._bystander, RECALL, self._names)
        elif work == PRESS:
            self._tell(sender, "press", self._names, self._address(scene, receiver))

    def _promise(self, scene: FaultScene, work: str, names: list[str]) -> None:
        sender, receiver = self._roles(scene)
        if work in STASHED:
            self._directory = self._relayed(scene, sender.ask("directory_address"))
            self._tell(sender, "stash", names, self._page_bytes)
        else:
            there = self._address(scene, receiver)
            self._tell(sender, "keep_back", names, self._page_bytes, there)

    def _claim(self, scene: FaultScene, claimer: ChaosChild, work: str, names: list[str]) -> None:
        sender, _ = self._roles(scene)
        here = self._address(scene, sender)
        if work in STASHED:
            num_claims = {NEEDLESS: 0, TWICE: 2}.get(work, 1)
            self._tell(
                claimer, "recall", names, self._page_bytes, (self._directory, here),
                self._num_known, self._end, num_claims, self._is_kept,
            )  # fmt: skip
        else:
            arguments = names, self._page_bytes, here, self._num_known, self._is_kept
            self._tell(claimer, "claim", *arguments)

    def _go_on_after(self, scene: FaultScene) -> None:
        """Others are served while the fault lasts. Who has taken a claimer's place is asked for the
        same."""
        _, receiver = self._roles(scene)
        if self._fault.replaces and receiver is scene.victim:
            self._claim(scene, receiver, self._step.work, self._names)
        self._serve_others(scene, "during")

    def _live_through(self, scene: FaultScene, laid_at: float) -> None:
        self._bystander.tell("finish", END_SECONDS)  # what it claims, it keeps until then
        super()._live_through(scene, laid_at)
        self._take_answers(self._bystander)
        self._judge(self._bystander, True, self._bystander.answer(), laid_at)
        if self._num_lost and not self._fault.kills_both:
            self._serve_all_others(scene, "during again")

    def _recover(self, scene: FaultScene, laid_at: float) -> None:
        """Then there is a new turn, and others are served again."""
        if self._fault.kills_both:
            scene.survivor = scene.survivor.successor()
        super()._recover(scene, laid_at)
        self._serve_all_others(scene, "after")
        work = RECALL if self._step.work in STASHED else CLAIM
        start = time.monotonic()
        words: list[Any] = []
        for attempt in range(100):
            words = self._turn(scene, work, [f"{self._names[0]}-turn-{attempt}"])
            if words and all(word == "ok" and is_right for _, word, is_right, _ in words):
                return
            if time.monotonic() - start > PROBE_SECONDS:
                break
        self.result.violations.append(f"no turn succeeds afterwards: {words}")

    def _turn(self, scene: FaultScene, work: str, names: list[str]) -> list[Any]:
        """Play a turn that nothing disturbs; how its claims have ended."""
        sender, receiver = self._roles(scene)
        self._promise(scene, work, names)
        self._take_answers(sender)
        sender.ask("await_promises")
        self._claim(scene, receiver, work, names)
        self._take_answers(receiver)
        sender.tell("finish", END_SECONDS)
        outcomes: list[Any] = receiver.ask("finish", END_SECONDS)
        sender.answer()
        return outcomes

    def _rest(self, scene: FaultScene) -> None:
        """Nobody holds anything, also who lives on as a victim."""
        parties = {"victim": scene.victim, "survivor": scene.survivor, "other": self._bystander}
        for who, process in parties.items():
            held = process.ask("held", REST_SECONDS)
            self.result.violations += [f"held by the {who}: {item}" for item in held]
        for process in (self._fresh, scene.survivor):
            if process is not self._survivor and not process.is_killed:
                process.ask("close")
        super()._rest(scene)

    # Others

    def _serve_all_others(self, scene: FaultScene, when: str) -> None:
        """As often as it takes: where all wait for a core, a living peer is taken for lost."""
        end = time.monotonic() + PROBE_SECONDS
        for attempt in range(100):
            self._num_lost = 0
            self._serve_others(scene, f"{when} {attempt}")
            for process in (self._bystander, scene.survivor):
                self._take_answers(process)
            if not self._num_lost:
                return
            if time.monotonic() > end:
                break
        self.result.violations.append(f"others are not served {when}: {self._num_lost}")

    def _serve_others(self, scene: FaultScene, when: str) -> None:
        """Let the bystander and the survivor exchange something."""
        names = [f"{self._names[0]}-{when}-{i}" for i in range(2 * NUM_OTHERS)]
        lists = names[:NUM_OTHERS], names[NUM_OTHERS:]
        pair = self._bystander, scene.survivor
        for process, other, order in ((*pair, 1), (*pair[::-1], -1)):
            if not process.is_killed:
                self._tell(process, "exchange", *lists[::order], OTHER_BYTES, other.control)

    def _take_answers(self, process: ChaosChild) -> list[Any]:
        """And judge those about others."""
        answers = super()._take_answers(process)
        for name, word, is_right, _ in (item for told in filter(None, answers) for item in told):
            self.result.others += word == "ok"
            self._num_lost += word != "ok"
            if not is_right or word == "stuck":
                self.result.violations.append(f"another request: {name}, {word}, {is_right}")
        return answers
