"""Weights: one order that changes them on all instances, and which instances may compute since.

    checking   every instance has the doors of vLLM that the order needs; else nothing is begun
    stopping   no request begins; those that run end, up to a deadline
    updating   each instance: pause (what still runs is aborted), the calls, reset of the caches,
               label, label read back, resume; requests begin as soon as a pair has the label
    done       an instance that failed a step stays paused: `Instance.held` says why

Only the label and the last order are kept here. Whether an instance is paused is asked of vLLM
with each probe, so a proxy that did not give the order, or has restarted, sees it as well.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from p2p_engine.errors import P2pError
from proxy.errors import ProxyError
from proxy.fleet.admin import decoded
from proxy.fleet.instances import Instance
from proxy.http.client import ClientError, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from proxy.config import ProxyConfig
    from proxy.fleet.registry import Registry
    from proxy.fleet.upstream import Upstream

logger = logging.getLogger(__name__)

# What an order may call. Each is in vLLM 0.29 to 0.33, with VLLM_SERVER_DEV_MODE=1.
CALLS = (
    "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
)  # fmt: skip
MAX_CALLS = 64
LABEL_SECONDS = 30.0  # for an answer that takes vLLM one step
RETRY_SECONDS = 0.05  # between two looks at what ends by itself
MAX_SAID = 300  # characters of an answer, in a reason
UNNAMED = "default"  # vLLM's label, while nobody has given one
BEING_CHANGED = "its weights are being changed"
PAUSED = "vLLM is paused"  # by whom, and for how long, the proxy does not know

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    body: dict[str, Any] = {}


class _Update(msgspec.Struct, forbid_unknown_fields=True):
    label: Label
    calls: Annotated[list[_Call], msgspec.Meta(max_length=MAX_CALLS)] = msgspec.field(
        default_factory=lambda: [_Call("/collective_rpc", {"method": "reload_weights"})]
    )
    ends: Literal["drain", "abort"] = "drain"
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    call_seconds: Seconds = 600.0


class _Label(msgspec.Struct, forbid_unknown_fields=True):
    label: Label


class _Resume(msgspec.Struct, forbid_unknown_fields=True):
    instance: str


class _StepFailed(P2pError):
    """An instance failed a step; `status` is that of its answer, 0 if there is none."""

    def __init__(self, message: str, status: int = 0, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late
        self.is_refused = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass
class Update:
    """An update, and what has become of it: `steps` has the last step of each instance, `failed`
    why one has failed; both by HTTP address."""

    label: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "checking"
    owned: list[Instance] = field(default_factory=list)
    steps: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return what `/status` shows."""
        shown = {"id": self.id, "label": self.label, "state": self.state}
        return {**shown, "steps": dict(self.steps), "failed": dict(self.failed)}


class FleetWeights:
    """Gives the orders. All methods run in the event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        upstream: Upstream,
        instance_key: str,
        clock: Callable[[], float],
    ) -> None:
        """`instance_key`: what vLLM's --api-key asks for, or ""."""
        self._drain_seconds = config.drain_timeout_seconds
        self._look_seconds = config.probe_timeout_seconds
        self._registry = registry
        self._upstream = upstream
        self._headers = {"Authorization": f"Bearer {instance_key}"} if instance_key else {}
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._is_labelling = False
        self.label = ""  # that instances must have which join; "": any
        self.order: Update | None = None  # the last one

    @property
    def is_running(self) -> bool:
        """Tell whether an order has begun and is not over."""
        return self.order is not None and self.order.state in ("stopping", "updating")

    @property
    def is_stopping(self) -> bool:
        """Tell whether requests end, and none may begin."""
        return self.order is not None and self.order.state == "stopping"

    @property
    def may_end_soon(self) -> bool:
        """Tell whether an instance that gets no legs may have some soon: an order runs, or somebody
        else has paused vLLM."""
        return self.is_running or any(i.held == PAUSED for i in self._registry.instances())

    def describe(self) -> dict[str, Any]:
        """Return what `/status` shows: the label, and the last order."""
        return {"label": self.label, "order": self.order.describe() if self.order else None}

    def refusal(self) -> ProxyError:
        """Return the error of a request that waited in vain for instances to go on."""
        if self.order is not None and self.is_running:
            message = f"the weights are being changed to {self.order.label}"
            return ProxyError(503, "weights_update", message)
        return ProxyError(503, "instance_paused", "vLLM is paused, and was not resumed in time")

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
                or one has no such doors. Then nothing was begun.
        """
        asked: _Update = decoded(body, _Update)
        _check_label(asked.label)
        for call in asked.calls:
            if call.path not in CALLS:
                allowed = ", ".join(CALLS)
                raise ProxyError(400, "invalid_request", f"{call.path!r} is none of {allowed}")
        self._refuse_second()
        before, self.order = self.order, Update(asked.label)
        try:
            await self._check_doors()
        except BaseException:
            self.order = before
            raise
        logger.info("weights: update to %s by=%s ends=%s", asked.label, sender, asked.ends)
        self.order.state = "stopping"
        self._task = asyncio.ensure_future(self._run(self.order, asked))
        return {"message": f"Updating to {asked.label}.", "order": self.order.id}

    async def name(self, body: bytes, sender: str) -> dict[str, Any]:
        """Give all instances a label, for a trainer that has changed their weights by itself.

        Returns, by HTTP address, why an instance does not have it; "" if it has.

        Raises:
            ProxyError: 400, the body is invalid; 409, an order runs, or there are no instances.
        """
        asked: _Label = decoded(body, _Label)
        _check_label(asked.label)
        self._refuse_second()
        places = self._places()
        self._is_labelling = True
        try:
            outcomes = await asyncio.gather(
                *(self._outcome(self._give_label(each[0], asked.label)) for each in places.values())
            )
        finally:
            self._is_labelling = False
        logger.info("weights: label %s by=%s", asked.label, sender)
        if not all(outcomes):
            self.label = asked.label
        return {"label": asked.label, "instances": dict(zip(places, outcomes, strict=True))}

    async def resume(self, body: bytes, sender: str) -> dict[str, Any]:
        """Resume an instance, whatever label it has: an operator says that its weights are right.

        Raises:
            ProxyError: 400, the body is invalid; 404, it is not registered; 409, an order runs;
                502, vLLM has not resumed it.
        """
        asked: _Resume = decoded(body, _Resume)
        self._refuse_second()
        found = [
            each for each in self._registry.instances()
            if asked.instance in (each.identity.name, each.identity.http_address)
        ]  # fmt: skip
        if not found:
            raise ProxyError(404, "unknown_instance", f"{asked.instance} is not registered")
        if why := await self._outcome(self._resume(found[0], LABEL_SECONDS)):
            raise ProxyError(502, "resume_failed", f"{asked.instance}: {why}")
        for instance in found:
            instance.held, instance.is_vouched_for = "", True
        logger.info("weights: resumed %s by=%s", asked.instance, sender)
        self._registry.on_room()
        return {"message": f"Resumed {asked.instance}."}

    async def look(self, instance: Instance, *, is_new: bool) -> None:
        """Ask vLLM whether it is paused, and, of one that is new or held, which label it has.

        Holds the instance back, or lets it have legs again. One that has no such doors is asked
        once. Waits for at most two answers.
        """
        if is_new:
            instance.has_doors = True
        if not instance.has_doors or self._owns(instance):
            return
        try:
            why = await self._why_held(instance, is_new=is_new)
        except _StepFailed as error:
            instance.has_doors = not error.is_refused
            if not is_new or not self.label:
                return
            why = f"it does not say whether its weights are {self.label}: {error}"
        if self._owns(instance):
            return
        was_held = instance.held
        # What an order has said is more than that it is paused.
        instance.held = why if not why or was_held in ("", PAUSED) else was_held
        if bool(was_held) != bool(why):
            name = instance.identity.name
            logger.info("instance %s http=%s %s", "paused" if why else "goes on", name, why)
            self._registry.on_room()

    async def _why_held(self, instance: Instance, *, is_new: bool) -> str:
        seconds = self._look_seconds
        if await self._is_paused(instance, seconds):
            return PAUSED
        # Who has only been paused may have been given another label meanwhile, by who paused it.
        is_doubted = is_new or instance.held not in ("", PAUSED)
        if not self.label or not is_doubted or instance.is_vouched_for:
            return ""
        theirs = await self._label_of(instance, seconds)
        return "" if theirs == self.label else f"weights: {theirs}, the fleet has {self.label}"

    def _owns(self, instance: Instance) -> bool:
        """Tell whether an order that runs decides about an instance."""
        return self.is_running and self.order is not None and instance in self.order.owned

    def _refuse_second(self) -> None:
        order = self.order
        if self._is_labelling:
            raise ProxyError(409, "order_running", "a label is being given")
        if order is not None and order.state != "done":
            raise ProxyError(409, "order_running", f"an update to {order.label} runs")

    def _places(self) -> dict[str, list[Instance]]:
        """Return all instances by HTTP address; ranks behind one address have the same weights.

        Raises:
            ProxyError: 409, there are none.
        """
        places: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in self._registry.instances():
            places[instance.identity.http_address].append(instance)
        if not places:
            raise ProxyError(409, "no_instances", "no instance is registered")
        return dict(places)

    async def _check_doors(self) -> None:
        """Refuse an order that an instance would refuse. One that is silent or broken fails the
        order for itself alone, later."""
        places = self._places()

        async def refusal(instance: Instance) -> str:
            try:
                await self._is_paused(instance, self._look_seconds)
                await self._label_of(instance, self._look_seconds)
            except _StepFailed as error:
                return str(error) if error.is_refused else ""
            return ""

        refusals = await asyncio.gather(*(refusal(each[0]) for each in places.values()))
        told = [f"{name}: {why}" for name, why in zip(places, refusals, strict=True) if why]
        if told:
            message = f"start vLLM with VLLM_SERVER_DEV_MODE=1: {'; '.join(told)}"
            raise ProxyError(409, "no_doors", message)

    async def _run(self, order: Update, asked: _Update) -> None:
        try:
            seconds = self._drain_seconds if asked.drain_seconds is None else asked.drain_seconds
            deadline = self._clock() + (seconds if asked.ends == "drain" else 0.0)
            await self._drain(deadline)
            # No await from here until all are held: else one could compute with old weights while
            # another has new ones.
            self.label, order.state = asked.label, "updating"
            places = self._places()
            order.owned = [instance for each in places.values() for instance in each]
            for instance in order.owned:
                instance.held, instance.is_vouched_for = BEING_CHANGED, False
            changes = (self._change(order, asked, deadline, each) for each in places.values())
            await asyncio.gather(*changes)
        except Exception:
            logger.exception("weights: internal error of the proxy")
        finally:
            order.state = "done"
            self._registry.on_room()
        logger.info("weights: update to %s over, failed=%s", order.label, list(order.failed))

    async def _drain(self, deadline: float) -> None:
        while not all(instance.is_idle for instance in self._registry.instances()):
            if self._clock() >= deadline:
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _change(
        self, order: Update, asked: _Update, deadline: float, ranks: list[Instance]
    ) -> None:
        """Change the weights behind one HTTP address, and let its ranks have legs again."""
        instance = ranks[0]
        address = instance.identity.http_address
        why = await self._outcome(self._take_steps(order, asked, deadline, instance))
        for rank in ranks:
            rank.held = why
        if not why:
            order.steps[address] = "done"
            self._registry.on_room()
            return
        order.failed[address] = why
        logger.warning("weights: %s stays paused: %s", address, why)
        # What others have sent there would wait for as long as it is paused.
        await self._outcome(self._post(instance, "/abort_requests", {}, LABEL_SECONDS))

    async def _take_steps(
        self, order: Update, asked: _Update, deadline: float, instance: Instance
    ) -> None:
        seconds = asked.call_seconds

        async def step(path: str, body: dict[str, Any], seconds: float = seconds) -> dict[str, Any]:
            order.steps[instance.identity.http_address] = path
            return await self._post(instance, path, body, seconds)

        await self._pause(step, min(deadline - self._clock(), seconds))
        for call in asked.calls:
            await step(call.path, call.body)
        ends_at = self._clock() + seconds
        # It fails while blocks are held, which end by themselves.
        while (await step("/reset_prefix_cache?reset_external=true", {})).get("success") is False:
            if self._clock() > ends_at:
                raise _StepFailed("/reset_prefix_cache: blocks are held")
            await asyncio.sleep(RETRY_SECONDS)
        order.steps[instance.identity.http_address] = "/update_weight_version"
        await self._give_label(instance, asked.label)
        order.steps[instance.identity.http_address] = "/resume"
        await self._resume(instance, seconds)

    async def _pause(
        self, step: Callable[..., Coroutine[Any, Any, dict[str, Any]]], left: float
    ) -> None:
        """Pause vLLM. Legs of other proxies may still run: they get what is left of the drain."""
        if left > 0:
            try:
                await step("/pause?mode=wait", {}, left)
            except _StepFailed as error:
                if not error.is_late:
                    raise
            else:
                return
        await step("/pause?mode=abort", {})

    async def _give_label(self, instance: Instance, label: str) -> None:
        await self._post(instance, "/update_weight_version", {"new_version": label}, LABEL_SECONDS)
        theirs = await self._label_of(instance, LABEL_SECONDS)
        if theirs != label:
            raise _StepFailed(f"/update_weight_version: it has {theirs}, not {label}")

    async def _resume(self, instance: Instance, seconds: float) -> None:
        await self._post(instance, "/resume", {}, seconds)
        if await self._is_paused(instance, LABEL_SECONDS):
            raise _StepFailed("/resume: it is still paused")

    async def _is_paused(self, instance: Instance, seconds: float) -> bool:
        """Ask vLLM; another server, which answers anything else, has no such door."""
        said = await self._ask(instance, "/is_paused", None, seconds)
        is_paused = said.get("is_paused")
        if not isinstance(is_paused, bool):
            raise _StepFailed("/is_paused: another answer than vLLM's", HTTPStatus.NOT_FOUND)
        return is_paused

    async def _label_of(self, instance: Instance, seconds: float) -> str:
        said = await self._ask(instance, "/weight_info", None, seconds)
        return str(said.get("weight_version"))[:MAX_SAID]

    async def _post(
        self, instance: Instance, path: str, body: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        return await self._ask(instance, path, msgspec.json.encode(body), seconds)

    async def _ask(
        self, instance: Instance, path: str, body: bytes | None, seconds: float
    ) -> dict[str, Any]:
        """Get a path, or post to it; return the answer's JSON object, {} if it has none.

        Raises:
            _StepFailed: another status than 200, or no answer within `seconds`.
        """
        method = "GET" if body is None else "POST"
        headers = {**self._headers, "Content-Type": "application/json"}
        told = path.partition("?")[0]
        try:
            status, said = await self._upstream.ask(
                method, instance, path, body or b"", headers, seconds, is_probe=True
            )
        except TimedOut as error:
            message = f"{told}: no answer within {seconds:g} s"
            raise _StepFailed(message, is_late=True) from error
        except ClientError as error:
            raise _StepFailed(f"{told}: {error}"[:MAX_SAID]) from error
        if status != HTTPStatus.OK:
            text = said[:MAX_SAID].decode(errors="replace")
            raise _StepFailed(f"{told}: HTTP {status}: {text}", status)
        try:
            answer = msgspec.json.decode(said) if said else {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            answer = {}
        return answer if isinstance(answer, dict) else {}

    async def _outcome(self, step: Coroutine[Any, Any, Any]) -> str:
        """Take a step; return why it has failed, or ""."""
        try:
            await step
        except _StepFailed as error:
            return str(error)
        except Exception as error:
            logger.exception("weights: internal error of the proxy")
            return f"internal error of the proxy: {error!r}"[:MAX_SAID]
        return ""


def _check_label(label: str) -> None:
    if label == UNNAMED:
        message = f"{UNNAMED!r} is what vLLM calls weights that have no label"
        raise ProxyError(400, "invalid_request", message)
