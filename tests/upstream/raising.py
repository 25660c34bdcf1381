"""A connector whose every hook raises: what a test that means something must fail for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

# What vLLM's scheduler calls for requests, in 0.29 to 0.33.
HOOKS = (
    "build_connector_meta",
    "get_num_new_matched_tokens",
    "on_new_request",
    "request_finished",
    "request_finished_all_groups",
    "update_connector_output",
    "update_state_after_alloc",
)


class HookCalled(Exception):
    """The hook that this names was called."""


def raising(connector: type[Any]) -> type[Any]:
    """Return a subclass of the same name whose every request hook raises `HookCalled`."""
    return type(connector.__name__, (connector,), {name: _raise(name) for name in HOOKS})


def _raise(name: str) -> Callable[..., NoReturn]:
    def hook(*_: object, **__: object) -> NoReturn:
        raise HookCalled(name)

    return hook
