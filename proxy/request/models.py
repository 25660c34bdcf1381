"""`/v1/models`: the models that the instances serve, each once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from quart import Response

from proxy.errors import ProxyError
from proxy.fleet.instances import Role
from proxy.http.client import ClientError
from proxy.openai.fields import BAD_JSON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.fleet.instances import Instance
    from proxy.fleet.upstream import Upstream

TIMEOUT_SECONDS = 10.0
PATH = "/v1/models"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


async def list_models(
    instances: list[Instance], upstream: Upstream, headers: Mapping[str, str], now: float
) -> Response:
    """Ask one ready decode instance of each announced model, and merge the answers.

    Raises:
        ProxyError: no decode instance is ready, or none answered with models.
    """
    asked = {i.identity.model: i for i in instances if i.is_routable(Role.DECODE, now)}
    if not asked:
        message = "no decode instance is ready"
        raise ProxyError(503, "no_instance", message, missing=[Role.DECODE.label])
    answers = await asyncio.gather(*(_ask(i, upstream, headers) for i in asked.values()))
    models = _merge([body for status, body in answers if status == 200])
    if models:
        body = msgspec.json.encode({"object": "list", "data": list(models.values())})
        return Response(body, 200, content_type="application/json")
    status, body = answers[0]
    if 400 <= status < 500:
        return Response(body, status, content_type="application/json")
    raise ProxyError(502, "models_failed", "no decode instance listed its models")


async def _ask(
    instance: Instance, upstream: Upstream, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    try:
        return await upstream.get(instance, PATH, headers, TIMEOUT_SECONDS)
    except ClientError:
        return 502, b""


def _merge(bodies: list[bytes]) -> dict[str, Any]:
    models: dict[str, Any] = {}
    for body in bodies:
        try:
            listed = msgspec.json.decode(body, type=_Models).data
            models |= {msgspec.json.decode(raw, type=_Model).id: raw for raw in listed}
        except BAD_JSON:
            continue
    return models
