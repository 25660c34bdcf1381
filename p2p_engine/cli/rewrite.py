"""Converts a launch command or --kv-transfer-config of the old connector to the current form."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from p2p_engine.cli.config_check import config_problems
from p2p_engine.config import EngineConfig
from p2p_engine.errors import ConfigError
from p2p_engine.sizing import MIB
from p2p_engine.transfer_config import (
    CHILDREN,
    EXTRA,
    TransferConfig,
    children,
    extra_of,
    is_multi,
    is_ours,
    our_config,
)

_NEVER_USED = "this connector never used it, and vLLM refuses it since 0.32"
_DROPPED_KEYS = {
    "kv_ip": f"{_NEVER_USED} (an instance's own address is `host` in {EXTRA})",
    "kv_parallel_size": _NEVER_USED,
    "kv_rank": _NEVER_USED,
}
_GONE = "vLLM 0.32 has no such option"
# Options of old launch commands, each with its number of values.
_DROPPED_OPTIONS = {
    "--cuda-graph-sizes": 1,
    "--device": 1,
    "--disable-async-output-proc": 0,
    "--disable-frontend-multiprocessing": 0,
    "--disable-log-request": 0,
    "--disable-log-requests": 0,
    "--guided-decoding-backend": 1,
    "--max-seq-len-to-capture": 1,
    "--num-scheduler-steps": 1,
    "--preemption-mode": 1,
    "--scheduler-delay-factor": 1,
    "--swap-space": 1,
    "--task": 1,
    "--use-v2-block-manager": 0,
    "--worker-use-ray": 0,
}
_DROPPED_VARIABLES = {
    "VLLM_USE_V1": "there is no other engine any more",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "not needed: transfers have ids of their own",
}
_OLD_PROXY = re.compile(r"disagg(_prefill)?_proxy_(p2p_nccl_)?xpyd\.py$")
_OPTION = "--kv-transfer-config"
_WORD = re.compile(r"""(?:\\[^\n]|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\])+""", re.DOTALL)


@dataclass
class Rewrite:
    """The new text, the changes, and the problems that the user must solve."""

    text: str = ""
    changes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def rewrite(text: str) -> Rewrite:
    """Rewrite JSON, or a shell command with all else in it left as it is.

    Raises:
        ValueError: it is neither.
    """
    text = text.strip()
    result = Rewrite()
    if text.startswith("{"):
        config = rewrite_config(_load(text), result)
        result.text = json.dumps(config)
    else:
        _CommandRewrite(text, result).run()
    return result


def rewrite_config(old: TransferConfig, result: Rewrite) -> dict[str, Any]:
    """Return the configuration in the form of vLLM 0.29 to 0.33; add changes to `result`.

    Raises:
        ConfigError: a value that must be a JSON object is not.
    """
    config = _rewrite_any(old, result)
    result.problems += config_problems(config)
    return config


def _rewrite_any(old: TransferConfig, result: Rewrite) -> dict[str, Any]:
    """Drop unused keys; convert our settings, alone or in a MultiConnector."""
    config = {key: value for key, value in old.items() if key not in _DROPPED_KEYS}
    result.changes += [
        f"{key}: dropped; {_DROPPED_KEYS[key]}" for key in sorted(old.keys() - config)
    ]
    if is_multi(config):
        entries = [_rewrite_entry(child, result) for child in children(config)]
        return {**config, EXTRA: {**extra_of(config), CHILDREN: entries}}
    return _rewrite_ours(config, result)


def _rewrite_entry(old: TransferConfig, result: Rewrite) -> dict[str, Any]:
    return _rewrite_any(old, result) if is_multi(old) or is_ours(old) else dict(old)


def _rewrite_ours(config: dict[str, Any], result: Rewrite) -> dict[str, Any]:
    extra = dict(extra_of(config))
    config.pop(EXTRA, None)
    if "kv_buffer_size" in config:
        size = extra.setdefault("kv_buffer_size", config.pop("kv_buffer_size"))
        moved = f"kv_buffer_size: moved into {EXTRA}; vLLM refuses it since 0.32"
        result.changes.append(moved + _of_small_buffer(size))
    port = config.get("kv_port")
    if isinstance(port, str) and port.isdecimal():
        config["kv_port"] = int(port)
        result.changes.append(f"kv_port: {port!r} is now the number {port}")
    if extra:
        config[EXTRA] = extra
    return config


def _of_small_buffer(value: object) -> str:
    """Say what becomes of KV if a buffer holds none of it."""
    try:
        size = EngineConfig.from_extra_config({"kv_buffer_size": value}).kv_buffer_size
    except ConfigError:  # a variable of the shell, or a problem that is named as one
        return ""
    if size >= MIB:
        return ""
    return f". {value!r} is {size} bytes, in which nothing lands: KV goes to the pool instead"


def _load(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}: {text}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {text}")
    return value


class _CommandRewrite:
    """Converts the words of a command; the gaps between kept words do not change."""

    def __init__(self, text: str, result: Rewrite) -> None:
        self._text = text
        self._result = result
        self._words = list(_WORD.finditer(text))
        self._kept: list[str] = []

    def run(self) -> None:
        number = 0
        while number < len(self._words):
            number = self._step(number)
        self._result.text = "".join(self._kept).strip()
        if self._words:
            self._result.text += self._text[self._words[-1].end() :]
        if not any(_OPTION in kept or "p2p-engine" in kept for kept in self._kept):
            self._result.problems.append(f"no {_OPTION} in this command: no KV is transferred")

    def _step(self, number: int) -> int:
        """Keep, convert or drop the word at this index; return the index of the next."""
        word = self._words[number].group()
        name = word.partition("=")[0]
        if name in _DROPPED_VARIABLES and "=" in word:
            self._note(f"{word}: dropped; {_DROPPED_VARIABLES[name]}")
            return number + 1
        if name in _DROPPED_OPTIONS:
            num_values = 0 if "=" in word else _DROPPED_OPTIONS[name]
            self._note(f"{name}: dropped; {_GONE}")
            return number + 1 + num_values
        if name == _OPTION and number + ("=" not in word) < len(self._words):
            return self._transfer_config(number)
        if _OLD_PROXY.search(word):
            return self._proxy(number)
        self._keep(number, word)
        return number + 1

    def _transfer_config(self, number: int) -> int:
        word = self._words[number].group()
        _, equals, value = word.partition("=")
        if not equals:
            self._keep(number, word)
            number += 1
            value = self._words[number].group()
        config = rewrite_config(_load(_unquote(value)), self._result)
        self._compare_ports(config)
        new = _quote_like(value, json.dumps(config))
        self._keep(number, f"{_OPTION}={new}" if equals else new)
        return number + 1

    def _compare_ports(self, config: TransferConfig) -> None:
        words = [word.group() for word in self._words]
        with contextlib.suppress(ConfigError):
            config = our_config(config)
        told = extra_of(config).get("http_port")
        if "--port" in words[:-1] and told is not None:
            port = _unquote(words[words.index("--port") + 1])
            if str(told) != port:
                self._result.problems.append(f"http_port is {told} but --port is {port}")

    def _proxy(self, number: int) -> int:
        if self._kept and re.search(r"python[\d.]*$", self._kept[-1]):
            gap = self._kept.pop()
            self._kept.append(gap[: len(gap) - len(gap.lstrip())] + "p2p-engine proxy")
        else:
            self._keep(number, "p2p-engine proxy")
        self._note("the old proxy script: now p2p-engine proxy, on the same ports")
        return number + 1

    def _keep(self, number: int, word: str) -> None:
        before = self._words[number - 1].end() if number else 0
        self._kept.append(self._text[before : self._words[number].start()] + word)

    def _note(self, change: str) -> None:
        self._result.changes.append(change)


def _unquote(word: str) -> str:
    return "".join(shlex.split(word))


def _quote_like(word: str, text: str) -> str:
    """Quote for the shell; keep double quotes, so that variables in them are still substituted."""
    if not word.startswith('"'):
        return shlex.quote(text)
    return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"'
