"""Every door by which vLLM takes transfers, names and places from a request is shut for clients.

Read from vLLM's own request models: a door that a release adds fails this test.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from proxy.openai import payload
from proxy.openai.apis import APIS, CLOSED
from proxy.request.attempt import FORWARDED_HEADERS
from proxy.request.forward import ERRAND_PATHS

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# What a field's name says if it may name a transfer, another request, or a place.
SUSPECT = re.compile(r"transfer|remote|request_id|xargs|extra|engine|rank|host|port\b|connector")
MARK = "evil"
SHUT = {"kv_transfer_params", "ec_transfer_params", "request_id", "vllm_xargs"}


# What vLLM does at its other doors has no prompt that could be prefilled elsewhere.
WITHOUT_TRANSFERS = {
    "/generative_scoring", "/v1/systemone", "/ping", "/inference/v1/abort_requests",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/audio/transcriptions",
    "/v1/audio/translations", "/v1/responses/{response_id}/cancel",
    "/v1/decisions",  # since 0.33
}  # fmt: skip
ABSENT = {"/cohere/v2/chat", "/cohere/v2/chat/render"}  # without Cohere's own package


def vllms_doors() -> dict[str, list[Any]]:
    """All paths to which vLLM lets a client of a model that generates post, and the models of what
    is posted."""
    from argparse import Namespace

    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from vllm.entrypoints.launchers.api_server.routers import register_api_routers
    from vllm.tasks import FRONTEND_TASKS, GENERATION_TASKS

    app, args = FastAPI(), Namespace(enable_scale_out=True, tokens_only=False)
    app.state.args = args
    register_api_routers(args, app, (*GENERATION_TASKS, *FRONTEND_TASKS))
    return {
        route.path: [route.body_field.field_info.annotation] if route.body_field else []
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    }


def takes_transfers(annotation: Any) -> bool:
    fields = getattr(annotation, "model_fields", {})
    return "kv_transfer_params" in fields or any(map(takes_transfers, get_args(annotation)))


def test_every_door_that_takes_transfers_is_served_or_refused_by_name() -> None:
    doors = vllms_doors()
    taking = {path for path, models in doors.items() if any(map(takes_transfers, models))}
    assert taking > set(APIS)
    assert taking - set(APIS) < set(CLOSED)
    assert set(CLOSED) - doors.keys() <= ABSENT
    assert not taking & set(ERRAND_PATHS)
    known = {*APIS, *CLOSED, *ERRAND_PATHS, *WITHOUT_TRANSFERS}
    assert doors.keys() <= known


def completion_models() -> list[Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return [ChatCompletionRequest, CompletionRequest, AnthropicMessagesRequest, ResponsesRequest]


def as_engine_gets_it(model: Any, sent: dict[str, Any]) -> Any:
    """What vLLM makes of a request before it samples."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    other = "prompt" if "input" in model.model_fields else "input"
    request = model.model_validate({k: v for k, v in sent.items() if k != other})
    if not hasattr(request, "to_sampling_params"):
        return AnthropicServingMessages.to_chat_completion_request(request)
    return request


def errand_models() -> list[Any]:
    from vllm.entrypoints.pooling.embed import protocol as embed
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    modules = (embed, tokenize)
    found = [getattr(module, name) for module in modules for name in dir(module)]
    return [each for each in found if hasattr(each, "model_fields")]


def test_every_suspect_field_is_known() -> None:
    models = completion_models() + errand_models()
    names = {
        name
        for model in models
        if "Request" in model.__name__
        for field_name, field in model.model_fields.items()
        for name in (field_name, field.alias, field.validation_alias)
        if isinstance(name, str)
    }
    assert names >= {"kv_transfer_params", "input", "tokens"}
    assert {name for name in names if SUSPECT.search(name)} == SHUT


def test_nothing_of_a_client_reaches_what_the_engine_reads() -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "x", "input": "x", "max_tokens": 8,
        "messages": [{"role": "user", "content": "x"}],
        "kv_transfer_params": {"remote_host": MARK},
        "ec_transfer_params": {"remote_host": MARK},
        "request_id": MARK,
        "vllm_xargs": {"kv_transfer_params": MARK, "ec_transfer_params": [MARK], "kept": 1},
        "KV_TRANSFER_PARAMS": {"remote_host": MARK},
        "extra_body": {"kv_transfer_params": {"remote_host": MARK}},
        "extra_args": {"kv_transfer_params": {"remote_host": MARK}},
    }  # fmt: skip
    (body,) = payload.decode_body(payload.parse(json.dumps(asked).encode()), None)
    assert isinstance(body, bytes)
    sent = json.loads(body)
    for model in completion_models():
        request = as_engine_gets_it(model, sent)
        arguments = request.to_sampling_params(1, default_sampling_params={}).extra_args
        assert arguments == {"kept": 1}
        assert request.kv_transfer_params is request.ec_transfer_params is None
        assert request.request_id != MARK


def test_no_header_that_vllm_reads_comes_from_a_client() -> None:
    from vllm.entrypoints.generate.base import serving

    ours = {"x-request-id", "x-data-parallel-rank"}
    read = {serving.PRIORITY_HEADER, serving.SESSION_ID_HEADER, *ours}
    assert not {name.lower() for name in read} & set(FORWARDED_HEADERS)
