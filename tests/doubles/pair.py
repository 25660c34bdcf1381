"""A prefill and a decode instance, simulated, and the requests that a proxy would send to both."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vllm.v1.request import RequestStatus

from p2p_engine.cli.ports import PortPlan
from p2p_engine.connector.intent import HELD_TOKENS
from p2p_engine.wire.request_ids import ProxyId, new_transfer_id
from tests.doubles.instance import NUM_LAYERS, InstanceDouble, continuation

HOST = "127.0.0.1"
ORDERS = ("prefill first", "decode first", "together")
SEND_TYPES = ("PUT", "PUT_ASYNC", "GET")
MakePair: TypeAlias = Callable[..., "Pair"]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of this many tokens, always the same one."""
    source = random.Random(f"{length} {seed}")
    return [source.randrange(2, 900) for _ in range(length)]


class Pair:
    """Two instances, P and D; every request is asked of both, and P's answer is thrown away."""

    def __init__(
        self,
        model: Path,
        *,
        prefill_role: str = "kv_producer",
        decode_role: str = "kv_consumer",
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._ports = PortPlan(HOST)
        common = {"model": model, **settings}
        self.p = InstanceDouble(
            role=prefill_role, kv_port=self._ports.take(), **{**common, **(prefill or {})}
        )
        self.d = InstanceDouble(
            role=decode_role, kv_port=self._ports.take(), **{**common, **(decode or {})}
        )
        self.prefill_ids: list[str] = []
        self.decode_ids: list[str] = []
        self._expected: dict[str, tuple[InstanceDouble, list[int]]] = {}
        self._thrown_away: dict[str, tuple[InstanceDouble, list[int]]] = {}
        self._waiting: list[Callable[[], object]] = []
        self.new_transfer_id = new_transfer_id

    @property
    def block_bytes(self) -> int:
        """The bytes of one block over all layers, on one rank."""
        cache = self.p.ranks[0].cache
        return NUM_LAYERS * cache[0, 0].numel() * cache.element_size()

    def close(self) -> None:
        """Close both."""
        self.p.close()
        self.d.close()
        self._ports.close()

    def ask(
        self,
        prompt: Sequence[int],
        *,
        order: str = "together",
        by: str = "id",
        max_tokens: int = 4,
        prefill_tokens: int = 1,
        transfer_id: str | None = None,
        index: int = 0,
        child: int = 0,
        swapped: bool = False,
        earlier: str | None = None,
        more: dict[str, Any] | None = None,
        present: int = 0,
    ) -> str:
        """Ask both; "prefill first" and "decode first" hold the other leg back for some steps.

        `by` what they know what to do: the proxy's "id", or "params"; "nameless" if these do not
        tell decode who sends. With the transfer id of an `earlier` turn, prefill is told where its
        KV is stashed; `more` goes to both as parameters. Prefill is told that the KV of so many
        tokens is `present` on decode, and decode what prefill has answered, if it was asked first.
        """
        prefill, decode = (self.d, self.p) if swapped else (self.p, self.d)
        transfer_id = transfer_id or new_transfer_id()
        proxy_id = ProxyId(prefill.address, decode.address, transfer_id)
        external_id = str(proxy_id) if by == "id" else f"req-{transfer_id}"
        number = len(self.decode_ids)
        names = [f"{child}_cmpl-{external_id}-{index}-{number:07x}{leg}" for leg in "ab"]
        params = [_params(transfer_id, leg, prefill, decode, by) for leg in ("prefill", "decode")]
        if earlier is not None and params[0] is not None:
            host, _, port = decode.address.rpartition(":")
            stashed = {"stashed_as": earlier, "stashed_host": host, "stashed_port": int(port)}
            params[0] |= stashed
        for given in params:
            if given is not None:
                given.update(more or {})
        if present and params[0] is not None:
            params[0]["remote_has_tokens"] = present
        self.prefill_ids.append(names[0])
        self.decode_ids.append(names[1])
        self._expected[names[1]] = (decode, continuation(prompt, max_tokens))
        self._thrown_away[names[0]] = (prefill, prefill.thrown_away(prompt, prefill_tokens))

        def ask_decode() -> None:
            if present and params[1] is not None:
                answered = prefill.params.get(names[0]) or {}
                if HELD_TOKENS in answered:  # else prefill takes no part
                    params[1][HELD_TOKENS] = answered[HELD_TOKENS]
            decode.add(names[1], prompt, max_tokens=max_tokens, params=params[1])

        legs = [
            lambda: prefill.add(names[0], prompt, max_tokens=prefill_tokens, params=params[0]),
            ask_decode,
        ]
        if order == "decode first":
            legs.reverse()
        legs[0]()
        if order == "together":
            legs[1]()
        else:
            self._waiting.append(legs[1])
        return names[1]

    def expect(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4) -> None:
        """Check this request of D's, too."""
        self.decode_ids.append(request_id)
        self._expected[request_id] = (self.d, continuation(prompt, max_tokens))

    def ask_waiting(self) -> None:
        """Send the legs that were held back."""
        for leg in self._waiting:
            leg()
        self._waiting.clear()

    def drop_waiting(self) -> None:
        """Never send them: the client has left, or the proxy is gone."""
        self._waiting.clear()

    def step(self) -> None:
        """One step of each."""
        self.p.step()
        self.d.step()

    def run(
        self,
        until: Callable[[], bool] | None = None,
        timeout: float = 20.0,
        only: InstanceDouble | None = None,
    ) -> None:
        """Step both, or `only` one, until both are idle, or `until`.

        Raises:
            TimeoutError: it did not come to that; names who waits for what.
        """
        deadline = time.monotonic() + timeout
        num_steps = 0
        while not (until() if until else self._is_idle()):
            (only or self).step()
            num_steps += 1
            if until is None and num_steps == 8:
                self.ask_waiting()
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                requests = [list(item.scheduler.requests.values()) for item in (self.p, self.d)]
                waiting = {r.request_id: r.status.name for some in requests for r in some}
                raise TimeoutError(f"after {num_steps} steps still open: {waiting}")

    def check_preempted(self) -> None:
        """Ask so much that both lose blocks in mid-prompt, in mid-answer and in mid-transfer."""
        for seed in range(12):
            self.ask(prompt_of(100 + 8 * seed, seed), prefill_tokens=30, max_tokens=60)
        self.run(timeout=60)
        self.check_answers()
        assert self.p.num_preemptions > 0
        assert self.d.num_preemptions > 0
        self.check_at_rest()

    def ask_in_orders(self, lengths: Sequence[int], orders: Sequence[str] = ORDERS) -> None:
        """Ask prompts of these lengths in every order; each is right, D computes one token, and
        nothing is left of any."""
        for seed, order in enumerate(orders):
            for length in lengths:
                self.ask(prompt_of(length, seed), order=order)
            self.run(timeout=40)
        self.check_answers(num_computed=1)
        self.check_finished()
        self.check_at_rest()

    def check_answers(self, num_computed: int | None = None) -> None:
        """Every token is right, and D has computed just so many of each prompt."""
        for name, (decode, answer) in self._expected.items():
            assert decode.answers[name] == answer, name
            if num_computed is not None:
                assert decode.num_computed_prompt_tokens[name] == num_computed, name

    def check_finished(self) -> None:
        """Every request has ended; those that ended well have answered right."""
        for name, (instance, answer) in (self._expected | self._thrown_away).items():
            if name not in instance.answers:
                continue  # never sent
            status, answered = instance.finished[name], instance.answers[name]
            if status is RequestStatus.FINISHED_LENGTH_CAPPED:
                assert answered == answer, (name, answered, answer)
            else:
                assert answered == answer[: len(answered)], (name, answered, answer)
                assert status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)

    def check_at_rest(self) -> None:
        """Nothing is left of any request: not in vLLM, not in the connector, not in the engines."""
        for instance in (self.p, self.d):
            check_scheduler_empty(instance)
            for rank in instance.ranks:
                check_rank_empty(rank.connector._worker)

    def landed_bytes(self, *places: str) -> int:
        """What has arrived on D, on all ranks, in these places (default: all)."""
        by_place = [_stats(rank)["landed_bytes_by_place"] for rank in self.d.ranks]
        return sum(item[place] for item in by_place for place in places or item)

    def sent_bytes(self) -> list[int]:
        """What has left each rank of P."""
        return [_stats(rank)["sent_bytes"] for rank in self.p.ranks]

    def has_sent(self, num_blocks: int) -> bool:
        """Whether so many blocks have left P's first rank."""
        sent_bytes: int = _stats(self.p.ranks[0])["sent_bytes"]
        return sent_bytes >= num_blocks * self.block_bytes

    def num_loaded_blocks(self, request_id: str) -> int:
        """How many blocks of a request that D still loads are in place."""
        worker = self.d.ranks[0].connector._worker
        loading = worker._loads[0]._loading.get(request_id) if worker is not None else None
        if loading is None or loading.sink is None:
            return 0
        return len(loading.blocks.block_ids) - len(loading.sink.missing_blocks())

    def take_long_step(self, seconds: float) -> None:
        """Let D take so long for one step, while P goes on."""
        ends_at = time.monotonic() + seconds

        def wait(layer: int) -> None:
            self.run(until=lambda: time.monotonic() >= ends_at, only=self.p)

        self.d.during_forward = wait
        self.d.step()
        self.d.during_forward = lambda layer: None
        wait(0)  # also if the step computes nothing

    def live_bytes(self) -> int:
        """What lies on D and has not been loaded."""
        return sum(_stats(rank)["live_bytes"] for rank in self.d.ranks)

    def _is_idle(self) -> bool:
        return not self._waiting and self.p.is_idle and self.d.is_idle


def play(pair: Pair, rng: random.Random) -> None:
    """Ask, abort and step at random."""
    stems = [prompt_of(200, seed) for seed in range(3)]
    for _ in range(25):
        event = rng.random()
        if event < 0.6 or not pair.decode_ids:
            prompt = rng.choice(stems)[: rng.randrange(1, 200)] + prompt_of(rng.randrange(1, 60))
            pair.ask(
                prompt,
                order=rng.choice(["together", "decode first", "prefill first"]),
                by=rng.choice(["id", "params"]),
                max_tokens=rng.randrange(1, 12),
                prefill_tokens=rng.choice([1, 1, 1, 8]),
            )
        elif event < 0.7:
            pair.p.abort(rng.choice(pair.prefill_ids))
        elif event < 0.8:
            pair.d.abort(rng.choice(pair.decode_ids))
        elif event < 0.85:
            pair.drop_waiting()
        elif event < 0.9:
            scheduler = rng.choice([pair.p, pair.d]).scheduler
            scheduler.reset_prefix_cache(reset_connector=event < 0.875)
        elif event < 0.95:
            for side in (pair.p, pair.d):
                side.connector.weights_labelled("default")  # they are those of the start
        else:
            pair.ask_waiting()
        for _ in range(rng.randrange(4)):
            pair.step()


def check_scheduler_empty(instance: InstanceDouble) -> None:
    """No request, no held block, no reference to a block, no plan of the connector's."""
    scheduler = instance.scheduler
    assert not scheduler.requests
    assert not scheduler.finished_recving_kv_req_ids
    assert not scheduler.failed_recving_kv_req_ids
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    half = instance.connector._scheduler
    assert half is not None
    assert not half._sending
    assert not half._loading
    assert not half._sent
    assert not half._wanted


def check_rank_empty(worker: Any) -> None:
    """Nothing that the worker half or its engine still holds; commits may be on their way, and
    answers to what the peer has given up."""
    for sends, loads in zip(worker._sends, worker._loads, strict=True):
        assert not sends._sendings
        assert not sends._held
        assert not sends._waiting
        assert not loads._loading
    assert not worker._sent._counts
    assert not worker._loaded._counts
    assert not worker._failed
    deadline = time.monotonic() + 10
    while (stats := worker.engine.stats())["open_transfers"] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stats["open_transfers"] == 0, stats
    assert stats["live_bytes"] == 0, stats
    assert stats["wrong_messages"] == 0, stats
    assert stats["control_errors"] == 0, stats
    while time.monotonic() < deadline:
        worker.take_results()
        if not any(sends._trailing for sends in worker._sends):
            break
        time.sleep(0.001)
    for sends in worker._sends:
        assert not sends._trailing
        assert getattr(sends._staging, "num_lent", 0) == 0


def _stats(rank: Any) -> dict[str, Any]:
    stats: dict[str, Any] = rank.connector._worker.engine.stats()
    return stats


def _params(
    transfer_id: str, leg: str, prefill: InstanceDouble, decode: InstanceDouble, by: str
) -> dict[str, Any] | None:
    if by == "id":
        return None
    host, _, port = (decode if leg == "prefill" else prefill).address.rpartition(":")
    if by == "nameless" and leg == "decode":
        return {"do_remote_prefill": True, "transfer_id": transfer_id}
    return {
        "do_remote_decode": leg == "prefill",
        "do_remote_prefill": leg == "decode",
        "transfer_id": transfer_id,
        "remote_host": host,
        "remote_port": int(port),
    }
