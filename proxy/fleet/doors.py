"""Doors: vLLM's own HTTP paths for a pause and for weights (VLLM_SERVER_DEV_MODE=1).

They are sent no key: vLLM guards only paths such as /v1 by its --api-key, and a key would go to
whatever registers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from p2p_engine.errors import P2pError
from proxy.http.client import ClientError, TimedOut

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from proxy.fleet.instances import Instance
    from proxy.fleet.upstream import Upstream

logger = logging.getLogger(__name__)

LABEL_SECONDS = 30.0  # for an answer that takes vLLM one step
RETRY_SECONDS = 0.05  # between two looks at what ends by itself
MAX_SAID = 128  # characters of what an instance says, in a reason
MAX_LOGGED = 1000  # bytes of an error, in the log
_HEADERS = {"Content-Type": "application/json"}


class DoorFailed(P2pError):
    """An instance did not do as asked; `status` is that of its answer, 0 if there is none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.is_refusal = 400 <= status < 500


class DoorSilent(DoorFailed):
    """An instance did not answer in time."""


class Doors:
    """Asks instances. Each method raises DoorFailed, within the seconds that each of its answers
    may take."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def is_paused(self, instance: Instance, seconds: float) -> bool:
        """Ask whether vLLM is paused. Another server, which answers anything else, has no such
        door: its status counts as 404."""
        said = await self._ask(instance, "/is_paused", None, seconds)
        is_paused = said.get("is_paused")
        if not isinstance(is_paused, bool):
            raise DoorFailed("/is_paused: another answer than vLLM's", HTTPStatus.NOT_FOUND)
        return is_paused

    async def pause(self, instance: Instance, left: float, seconds: float) -> None:
        """Pause vLLM, and ask whether it is paused. What runs there gets `left` seconds to end,
        then it is aborted: also where vLLM 0.29 to 0.31 do not wait, as for a load of KV."""
        if left > 0:
            with suppress(DoorFailed):
                await self.post(instance, "/pause?mode=wait", {}, left)
        await self.post(instance, "/pause?mode=abort", {}, seconds)
        if not await self.is_paused(instance, LABEL_SECONDS):
            raise DoorFailed("/pause: it is not paused")

    async def abort(self, instance: Instance, seconds: float) -> None:
        """Abort what waits in a paused vLLM; its caches stay as they are, so it keeps a label."""
        await self.post(instance, "/pause?mode=abort&clear_cache=false", {}, seconds)

    async def reset(self, instance: Instance, seconds: float) -> None:
        """Empty the caches. That fails while blocks are held, so it is tried until they end."""
        path, ends_at = "/reset_prefix_cache?reset_external=true", time.monotonic() + seconds
        while (await self.post(instance, path, {}, seconds)).get("success") is False:
            if time.monotonic() > ends_at:
                raise DoorFailed("/reset_prefix_cache: blocks are held")
            await asyncio.sleep(RETRY_SECONDS)

    async def resume(self, instance: Instance, seconds: float) -> None:
        """Resume vLLM, and ask whether it goes on."""
        await self.post(instance, "/resume", {}, seconds)
        if await self.is_paused(instance, LABEL_SECONDS):
            raise DoorFailed("/resume: it is still paused")

    async def give_label(self, instance: Instance, label: str) -> None:
        """Give the weights a label, and read it back."""
        await self.post(instance, "/update_weight_version", {"new_version": label}, LABEL_SECONDS)
        said = await self._ask(instance, "/weight_info", None, LABEL_SECONDS)
        theirs = str(said.get("weight_version"))[:MAX_SAID]
        if theirs != label:
            raise DoorFailed(f"/update_weight_version: it has {theirs}, not {label}")

    async def post(
        self, instance: Instance, path: str, body: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Post to a path; return the answer's JSON object, {} if it has none.

        The reason of a failure has the path and the status. What vLLM says beside them is only
        logged, because `/status` has other readers than the log.
        """
        return await self._ask(instance, path, msgspec.json.encode(body), seconds)

    async def _ask(
        self, instance: Instance, path: str, body: bytes | None, seconds: float
    ) -> dict[str, Any]:
        method, told = "GET" if body is None else "POST", path.partition("?")[0]
        try:
            status, said = await self._upstream.ask(
                method, instance, path, body or b"", _HEADERS, seconds, is_probe=True
            )
        except TimedOut as error:
            raise DoorSilent(f"{told}: no answer within {seconds:g} s") from error
        except ClientError as error:
            raise DoorFailed(f"{told}: {error}"[:MAX_SAID]) from error
        if status != HTTPStatus.OK:
            if body is not None:
                address = instance.identity.http_address
                logger.warning("weights: %s%s says %r", address, told, said[:MAX_LOGGED])
            raise DoorFailed(f"{told}: HTTP {status}", status)
        try:
            answer = msgspec.json.decode(said) if said else {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            answer = {}
        return answer if isinstance(answer, dict) else {}


async def outcome_of(step: Coroutine[Any, Any, Any]) -> str:
    """Take a step; return why it has failed, or ""."""
    try:
        await step
    except DoorFailed as error:
        return str(error)
    except Exception as error:
        logger.exception("weights: internal error of the proxy")
        return internal(error)
    return ""


def internal(error: Exception) -> str:
    """Return the reason of what failed by a fault of the proxy itself."""
    return f"internal error of the proxy: {error!r}"[:MAX_SAID]
