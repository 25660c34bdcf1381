"""`p2p-engine doctor --migrate`: says by line what of a launch file no longer holds, and what to
write instead. The file is only read."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from p2p_engine.cli.launch_text import LaunchText, Setting
from p2p_engine.cli.old_settings import (
    NIXL_CONNECTORS,
    NIXL_SETTINGS,
    REMOVED_KEYS,
    REMOVED_OPTIONS,
    REMOVED_VARIABLES,
    VALUES_OF_VLLM,
)
from p2p_engine.config import EXTRA_KEYS, EngineConfig
from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import CONNECTOR, EXTRA, MODULE_KEY, MODULE_PATH
from p2p_engine.wire.addresses import is_any_address

MAX_FILE_BYTES = 1 << 20  # a launch file has some thousand

_NAMES = "|".join((CONNECTOR, *NIXL_CONNECTORS))
_NAME = re.compile(
    rf"""(?:(?<!\w)(?P<variable>\w+)["']?[ \t]*[:=][ \t:-]*[\\"']*)?\b(?P<name>{_NAMES})\b"""
)
_VARIABLE = re.compile(r"\bVLLM_[A-Z0-9_]+\b")
_OLD_PROXY = re.compile(r"\bdisagg(?:_prefill)?_proxy(?:_p2p_nccl)?_xpyd\.py\b")
_MODULE = re.compile(r"\bvllm\.distributed\.kv_transfer\.kv_connector\.v1\.(?:p2p|nixl)[\w.]*")
_KNOWN_VALUE = re.compile(r"[0-9]+|put|put_async|get", re.IGNORECASE)  # others may be a name's
_PLACEHOLDERS = {"proxy_ip": "proxy", "proxy_port": 1, "http_port": 1}

Change = tuple[int, str]  # a line's number, and what to say about it


def run_migrate(paths: Sequence[Path], console: Console) -> int:
    """Print the changes that each file needs. Return 0 if there are none; 1 if there are some; 2 if
    a file names the connector, and its settings are in none of the files.

    Raises:
        OSError: a file cannot be read.
        ConfigError: a file is far larger than a launch file.
    """
    texts = {path: LaunchText(_read(path)) for path in paths}
    variables = {
        name
        for text in texts.values()
        for config in _configs(text)
        for name in re.findall(r"\w+", _value(config, "kv_connector"))
    }
    is_any_known = any(map(_configs, texts.values()))
    code = 0
    for path, text in texts.items():
        needed = set(changes(text))
        unknown = set(_not_understood(text, variables, is_any_known))
        for line, said in sorted(needed | unknown):
            _print(console, f"{path}:{line}: {said}")
        if not needed | unknown:
            _print(console, f"{path}: nothing to change")
        code = max(code, 2 if unknown else int(bool(needed)))
    return code


def changes(text: LaunchText) -> Iterator[Change]:
    """Yield what to write instead of what no longer holds; the same may come twice."""
    configs = _configs(text)
    yield from _of_words(text, configs)
    yield from _of_options(text)
    extras = {id(setting.below) for config in configs for setting in config if setting.key == EXTRA}
    for mapping in text.mappings:
        if id(mapping) not in extras:
            yield from _of_mapping(mapping)
    for config in configs:
        yield from _of_config(config)


def _of_words(text: LaunchText, configs: list[list[Setting]]) -> Iterator[Change]:
    is_alias = any(_value(config, MODULE_KEY) == MODULE_PATH for config in configs)
    nixls = {} if is_alias else NIXL_SETTINGS  # under NIXL's name, its variables are ours
    for line, found in text.find(_VARIABLE):
        variable = found.group()
        instead = REMOVED_VARIABLES.get(variable) or nixls.get(variable)
        if instead:
            yield line, f"{variable}: {instead}"
    for line, found in text.find(_OLD_PROXY):
        yield line, f"{found.group()}: write p2p-engine proxy; it has the same ports"
    for line, found in text.find(_MODULE):
        yield line, f"{found.group()}: write p2p_engine.connector, or remove {MODULE_KEY}"
    for line, found in text.find(_NAME):
        if found["variable"] not in (None, "kv_connector") and found["name"] in NIXL_CONNECTORS:
            yield line, f"{found['name']}: {NIXL_CONNECTORS[found['name']]}"


def _of_options(text: LaunchText) -> Iterator[Change]:
    for option in text.options:
        values = VALUES_OF_VLLM.get(option.key)
        if option.key in REMOVED_OPTIONS and (values is None or option.value in values):
            name = "--" + option.key.replace("_", "-")
            yield option.line, f"{name}: {REMOVED_OPTIONS[option.key]}"


def _of_mapping(mapping: list[Setting]) -> Iterator[Change]:
    """Name keys that vLLM no longer takes: beside `kv_connector`, and options as keys of YAML."""
    for setting in mapping:
        if setting.key in REMOVED_KEYS:
            yield setting.line, f"{setting.key}: {REMOVED_KEYS[setting.key]}"
        elif setting.key in REMOVED_OPTIONS and setting.key not in VALUES_OF_VLLM:
            yield setting.line, f"{setting.key}: {REMOVED_OPTIONS[setting.key]}"


def _of_config(config: list[Setting]) -> Iterator[Change]:
    """Name what one --kv-transfer-config says of NIXL, and settings that would be refused."""
    name = _value(config, "kv_connector")
    path = _value(config, MODULE_KEY)
    known = _NAME.search(name)
    is_alias = path == MODULE_PATH
    is_others = bool(path) and not is_alias and not path.startswith("vllm.")
    if is_others or (known is None and name.isidentifier()):
        return  # another connector
    extras = [setting.below for setting in config if setting.key == EXTRA]
    for extra in extras:
        yield from _of_extra(extra)
    if is_alias:  # it reads NIXL's settings, or names them at the start
        return
    for extra in extras:
        yield from _of_nixl(extra)
    for setting in config:
        if setting.key == "kv_connector" and known and known["name"] in NIXL_CONNECTORS:
            yield setting.line, f"{known['name']}: {NIXL_CONNECTORS[known['name']]}"
            yield from _of_nixl(config)


def _of_nixl(settings: list[Setting]) -> Iterator[Change]:
    for setting in settings:
        if setting.key in NIXL_SETTINGS:
            yield setting.line, f"{setting.key}: {NIXL_SETTINGS[setting.key]}"


def _of_extra(settings: list[Setting]) -> Iterator[Change]:
    for setting in settings:
        key, value = setting.key, setting.value
        if key not in EXTRA_KEYS:
            if key not in NIXL_SETTINGS:
                yield setting.line, f"{key}: remove it; {CONNECTOR} refuses a setting of this name"
        elif key == "proxy_ip" and is_any_address(value):
            said = "write the address of the proxy's host; this one leads each instance to its own"
            yield setting.line, f"{key}={value}: {said}"
        elif _KNOWN_VALUE.fullmatch(value):
            try:
                EngineConfig.from_extra_config({**_PLACEHOLDERS, key: value})
            except ConfigError as error:
                yield setting.line, str(error)


def _not_understood(text: LaunchText, variables: set[str], is_any_known: bool) -> Iterator[Change]:
    """Name each place of a connector whose settings are not to be seen. `variables` are those that
    a configuration has as its connector."""
    if _configs(text):
        return
    has_name = False
    for line, found in text.find(_NAME):
        if found["variable"] not in variables:
            has_name = True
            yield line, f"{found['name']}: NOT UNDERSTOOD; its settings are in no file given"
    for option in text.options:
        if option.key == "kv_transfer_config" and option.value and (has_name or not is_any_known):
            said = "NOT UNDERSTOOD; its value is in no file given"
            yield option.line, f"--kv-transfer-config {option.value}: {said}"


def _configs(text: LaunchText) -> list[list[Setting]]:
    return [
        mapping
        for mapping in text.mappings
        if any(setting.key == "kv_connector" for setting in mapping)
    ]


def _value(config: list[Setting], key: str) -> str:
    return next((setting.value for setting in config if setting.key == key), "")


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes: no launch file has")
    is_utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf_16 else "utf-8-sig", errors="replace")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
