"""States: what layers keep that fold all tokens into one block, as Mamba2's do.

Each token overwrites the state. Decode computes the prompt's last token itself, so it needs the
state before that one, and prefill must not compute it. So prefill's request is cut by one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform

from p2p_engine.connector.intent import InvalidParams

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.request import Request


def packing_of(spec: MambaSpec) -> str:
    """Return the name by which peers compare the bytes of states: kind, layout, shapes, dtypes."""
    parts = (
        f"{'x'.join(map(str, shape))}:{dtype}".replace("torch.", "")
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower()
    words = current_platform.device_name, "state", kind, get_conv_state_layout(), *parts
    return " ".join(words)


def num_tokens_before_last(request: Request) -> int:
    """Return how many tokens of a prompt are transferred: all but the last, or all, and then nobody
    loads them.

    A prompt of which one token would be left stays whole: vLLM's graphs of decode steps take it for
    one, and go on from whatever state they ran with last. So does one that ends in a medium, whose
    end some models look for.
    """
    num_tokens = int(request.num_prompt_tokens)
    ends_in_medium = any(
        item.mm_position.offset + item.mm_position.length >= num_tokens
        for item in request.mm_features
    )
    return num_tokens if num_tokens <= 2 or ends_in_medium else num_tokens - 1


def check_prefill(request: Request) -> None:
    """Check that a request to prefill may be cut.

    Raises:
        InvalidParams: it may not; it is computed here as a whole.
    """
    sampling = request.sampling_params
    if sampling is not None and sampling.prompt_logprobs is not None:
        raise InvalidParams("prompt_logprobs need the whole prompt, and a state is sent before")
    if sampling is not None and sampling.min_tokens > 1:
        raise InvalidParams(f"min_tokens={sampling.min_tokens} would overwrite the state")


def end_before_last_token(request: Request) -> None:
    """Cut the last token off the prompt, and compute no token behind it; call it once."""
    num_cut = int(request.num_prompt_tokens) - num_tokens_before_last(request)
    request.max_tokens = 1
    if num_cut and request.prompt_token_ids is not None:
        # Choices of one request share this list; the other is the request's own.
        request.prompt_token_ids = request.prompt_token_ids[:-num_cut]
        del request._all_token_ids[-num_cut:]
        request.num_prompt_tokens -= num_cut
