"""Weights: one order that changes them on all instances.

    stopping   no request begins; those that run end, up to a deadline
    updating   each instance: pause (what still runs is aborted), the calls, reset of the caches,
               label, label read back, what waits is aborted, resume
    done       an instance that failed a step is paused

An instance gets no requests while it is `held`:
    BEING_CHANGED   an order decides about it alone
    PAUSED          vLLM says so, whoever has paused it, until vLLM goes on (readiness.py)
    a failed step   until the next order, label or resume

What weights are called is not kept here: each instance says it in its heartbeats, and the router
pairs those that say the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict, deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from p2p_engine.wire.bindings import short_name
from proxy.errors import ProxyError
from proxy.fleet.admin import decoded
from proxy.fleet.doors import (
    LABEL_SECONDS,
    RETRY_SECONDS,
    DoorFailed,
    Doors,
    internal,
    outcome_of,
)
from proxy.fleet.instances import BEING_CHANGED, PAUSED, Instance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from proxy.config import ProxyConfig
    from proxy.fleet.registry import Registry

logger = logging.getLogger(__name__)

MAX_CALLS = 64
MAX_ORDERS = 8  # that are remembered: who has given one asks for its end, maybe behind another's
LEFT = "it left during the drain"
MAX_SECONDS = 86400.0  # that an order may give to a drain, or to a call

# vLLM itself calls weights `default` to which nobody has given a label.
Label = Annotated[str, msgspec.Meta(max_length=128, pattern=r"\A(?!default\Z)[!-~]+\Z")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    # Each is in vLLM 0.29 to 0.33, with VLLM_SERVER_DEV_MODE=1.
    path: Literal[
        "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update",
        "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
    ]  # fmt: skip
    body: dict[str, Any] = {}


class _Update(msgspec.Struct, forbid_unknown_fields=True):
    label: Label
    model: str = ""
    calls: Annotated[list[_Call], msgspec.Meta(max_length=MAX_CALLS)] = msgspec.field(
        default_factory=lambda: [_Call("/collective_rpc", {"method": "reload_weights"})]
    )
    ends: Literal["drain", "abort"] = "drain"
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] | None = None
    call_seconds: Seconds = 600.0


class _Label(msgspec.Struct, forbid_unknown_fields=True):
    label: Label
    model: str = ""


class _Resume(msgspec.Struct, forbid_unknown_fields=True):
    instance: str


@dataclass
class Update:
    """An update, and what has become of it: `steps` has the last step of each instance, `failed`
    why one has failed; both by HTTP address."""

    label: str
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "stopping"
    steps: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class FleetWeights:
    """Gives the orders, one at a time. All methods run in the event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        doors: Doors,
        clock: Callable[[], float],
    ) -> None:
        self._drain_seconds = config.drain_timeout_seconds
        self._look_seconds = config.probe_timeout_seconds
        self._registry = registry
        self._doors = doors
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._runs = ""  # what runs: an update, a label or a resume
        self._orders: deque[Update] = deque(maxlen=MAX_ORDERS)  # the updates, the last one first

    def describe(self) -> dict[str, Any]:
        """Return what `/status` shows: the last order, and those before it."""
        order, *earlier = msgspec.to_builtins(list(self._orders)) or [None]
        return {"order": order, "earlier": earlier}

    def refusal(self, model: str | None) -> ProxyError:
        """Return the error of a request that waited in vain for instances to go on."""
        if self.state(model) != "done":
            message = f"the weights are being changed to {self._orders[0].label}"
            return ProxyError(503, "weights_update", message)
        return ProxyError(503, "instance_paused", "vLLM is paused, and was not resumed in time")

    def state(self, model: str | None) -> str:
        """Return the state of the last order, `done` if it is for another model: `stopping` while
        requests end, and none may begin. A name that no instance announces may mean any model."""
        order = next(iter(self._orders), None)
        if order is None or (order.model not in ("", model) and self._registry.announces(model)):
            return "done"
        return order.state

    async def close(self) -> None:
        """Leave an order where it is: what vLLM has paused stays paused; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def update(self, body: bytes, sender: str) -> dict[str, Any]:
        """Begin an order; `/status` shows how it goes on, and its end.

        Waits until each instance has said that it has the doors for it, or is late.

        Raises:
            ProxyError: 400, the body is invalid; 409, another order runs, there are no instances,
                or of several models, or one has no such doors. Then nothing was begun.
        """
        asked: _Update = decoded(body, _Update)
        with ExitStack() as turn:
            turn.enter_context(self._alone(f"an update to {asked.label} runs"))
            model = self._model(asked.model)
            checked = self._places(model)
            await self._check_doors(checked)
            logger.info("weights: update to %s by=%s ends=%s", asked.label, sender, asked.ends)
            order = Update(asked.label, model)
            self._orders.appendleft(order)
            self._task = asyncio.ensure_future(
                self._run(order, asked, set(checked), turn.pop_all())
            )
        return {"message": f"Updating to {asked.label}.", "order": order.id}

    async def name(self, body: bytes, sender: str) -> dict[str, Any]:
        """Give a model's instances a label, for a trainer that has changed their weights by itself.

        One that says that its weights are those of its start, while others' have changed, gets
        none.

        Returns, by HTTP address, why an instance does not have it; "" if it has. Waits for two
        answers of each.

        Raises:
            ProxyError: 400, the body is invalid; 409, an order runs, or there are no instances, or
                of several models.
        """
        asked: _Label = decoded(body, _Label)
        with self._alone(f"the label {asked.label} is being given"):
            places = self._places(self._model(asked.model))
            have_changed = any(r.weights_changed for ranks in places.values() for r in ranks)

            async def give(instance: Instance) -> None:
                if have_changed and instance.weights and not instance.weights_changed:
                    was = f"its weights, {instance.weights}, are those of its start"
                    raise DoorFailed(f"{was}, and those of others have changed")
                await self._doors.give_label(instance, asked.label)

            steps = [give(ranks[0]) for ranks in places.values()]
            outcomes = await asyncio.gather(*map(outcome_of, steps))
        for ranks, why in zip(places.values(), outcomes, strict=True):
            if not why:
                _rename(ranks, asked.label)
                for rank in ranks:
                    rank.held = rank.held and PAUSED  # until vLLM says that it is not
        logger.info("weights: label %s by=%s", asked.label, sender)
        return {"label": asked.label, "instances": dict(zip(places, outcomes, strict=True))}

    async def resume(self, body: bytes, sender: str) -> dict[str, Any]:
        """Resume an instance, whatever label it has: an operator says that its weights are right.

        Waits for two answers.

        Raises:
            ProxyError: 400, the body is invalid; 404, it is not registered; 409, an order runs;
                502, vLLM has not resumed it.
        """
        asked: _Resume = decoded(body, _Resume)
        address = asked.instance.partition("#")[0]
        with self._alone(f"{address} is being resumed"):
            ranks = [i for i in self._registry.instances() if i.identity.http_address == address]
            if not ranks:
                raise ProxyError(404, "unknown_instance", f"{asked.instance} is not registered")
            if why := await outcome_of(self._doors.resume(ranks[0], LABEL_SECONDS)):
                raise ProxyError(502, "resume_failed", f"{asked.instance}: {why}")
            for rank in ranks:
                rank.held = ""
        logger.info("weights: resumed %s by=%s", asked.instance, sender)
        self._registry.on_room()
        return {"message": f"Resumed {asked.instance}."}

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Let nothing else change labels, or resume, until the end.

        Raises:
            ProxyError: 409, something does.
        """
        if self._runs:
            raise ProxyError(409, "order_running", self._runs)
        self._runs = what
        try:
            yield
        finally:
            self._runs = ""

    def _model(self, asked: str) -> str:
        """Return the model whose weights are meant.

        Raises:
            ProxyError: 409, there are several, and none was named, or an instance that was added
                by hand may be of any.
        """
        models = {instance.identity.model for instance in self._registry.instances()}
        named = {asked, *models} - {""}
        if len(named) > 1 and (not asked or "" in models):
            message = (
                f"name one of the models {', '.join(sorted(named))}, and that of each instance"
            )
            raise ProxyError(409, "several_models", message)
        return asked or next(iter(named), "")

    def _instances(self, model: str) -> list[Instance]:
        return [i for i in self._registry.instances() if i.identity.model in (model, "")]

    def _places(self, model: str) -> dict[str, list[Instance]]:
        """Return a model's instances by HTTP address; ranks behind one have the same weights.

        Raises:
            ProxyError: 409, there are none.
        """
        if not (places := self._found(model)):
            raise ProxyError(409, "no_instances", "no such instance is registered")
        return places

    def _found(self, model: str) -> dict[str, list[Instance]]:
        places: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in self._instances(model):
            places[instance.identity.http_address].append(instance)
        return dict(places)

    async def _check_doors(self, places: dict[str, list[Instance]]) -> None:
        """Refuse an order that an instance would refuse. One that is silent or broken fails the
        order for itself alone, later."""

        looks = [self._doors.is_paused(r[0], self._look_seconds) for r in places.values()]
        answers = zip(places, await asyncio.gather(*looks, return_exceptions=True), strict=True)
        if told := [
            f"{name}: {error}"
            for name, error in answers
            if isinstance(error, DoorFailed) and error.is_refusal
        ]:
            message = f"start vLLM with VLLM_SERVER_DEV_MODE=1: {'; '.join(told)}"
            raise ProxyError(409, "no_doors", message)

    async def _run(self, order: Update, asked: _Update, checked: set[str], turn: ExitStack) -> None:
        seconds = self._drain_seconds if asked.drain_seconds is None else asked.drain_seconds
        deadline = self._clock() + (seconds if asked.ends == "drain" else 0.0)
        with turn:
            try:
                await self._drain(order.model, deadline)
                # No await from here until all are held: else one could compute with old weights
                # while another has new ones.
                order.state, places = "updating", self._found(order.model)
                order.failed = dict.fromkeys(checked - places.keys(), LEFT)
                for instance in self._instances(order.model):
                    instance.held = BEING_CHANGED
                changes = (self._change(order, asked, deadline, each) for each in places.values())
                await asyncio.gather(*changes)
            except Exception as error:
                logger.exception("weights: internal error of the proxy")
                unchanged = [name for name in checked if order.steps.get(name) != "done"]
                order.failed = {**dict.fromkeys(unchanged, internal(error)), **order.failed}
            finally:
                order.state = "done"
        self._registry.on_room()
        logger.info("weights: update to %s over, failed=%s", order.label, list(order.failed))

    async def _drain(self, model: str, deadline: float) -> None:
        while not all(instance.is_idle for instance in self._instances(model)):
            if self._clock() >= deadline:
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _change(
        self, order: Update, asked: _Update, deadline: float, ranks: list[Instance]
    ) -> None:
        """Change the weights behind one HTTP address, and let its ranks have legs again."""
        instance = ranks[0]
        address = instance.identity.http_address
        why = await outcome_of(self._take_steps(order, asked, deadline, instance))
        for rank in ranks:
            rank.held = why
        if not why:
            _rename(ranks, asked.label)
            order.steps[address] = "done"
            self._registry.on_room()
            return
        order.failed[address] = why
        logger.warning("weights: %s stays paused: %s", address, why)
        # What others have sent there would wait for as long as it is paused.
        await outcome_of(self._doors.abort(instance, LABEL_SECONDS))

    async def _take_steps(
        self, order: Update, asked: _Update, deadline: float, instance: Instance
    ) -> None:
        doors, seconds = self._doors, asked.call_seconds
        # Legs of other proxies may still run: they get what is left of the drain.
        left = min(deadline - self._clock(), seconds)
        steps: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("/pause", partial(doors.pause, instance, left, seconds)),
            *(
                (c.path, partial(doors.post, instance, c.path, c.body, seconds))
                for c in asked.calls
            ),
            ("/reset_prefix_cache", partial(doors.reset, instance, seconds)),
            ("/update_weight_version", partial(doors.give_label, instance, asked.label)),
            # A beam search had no request that the pause could abort between two of its tokens.
            ("/pause", partial(doors.abort, instance, seconds)),
            ("/resume", partial(doors.resume, instance, seconds)),
        ]
        for path, step in steps:
            order.steps[instance.identity.http_address] = path
            await step()


def _rename(ranks: list[Instance], label: str) -> None:
    """Do not wait for the heartbeat: meanwhile, decode would compute all that waits."""
    for rank in ranks:
        rank.weights, rank.weights_changed = rank.weights and short_name(label), True
