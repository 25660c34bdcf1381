"""What decides a prompt's KV is compared, field by field, and right pairs are not refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import transformers
from vllm import config as vllm_configs
from vllm.config import MultiModalConfig, VllmConfig

from p2p_engine.connector.identity import MAX_VALUE, identity_of, text_of
from p2p_engine.connector.identity_fields import ENVIRONMENT, HF, TABLES, is_compared
from tests.doubles.vllm_config import make_config, write_model_config

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

DOCUMENT = Path(__file__).parents[2] / "docs" / "identity.md"
SECTION = re.compile(r"^### `(\w+)`\n(.+?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", re.MULTILINE)


def config_of(folder: Path, *, name: str = "model", **changes: Any) -> VllmConfig:
    """A configuration as vLLM resolves it; changes are of the model's file."""
    where = folder / name
    where.mkdir(exist_ok=True)
    return make_config(write_model_config(where, **changes), "kv_producer", 0)


def told(config: VllmConfig, *accepted: str) -> dict[str, str]:
    """Its identity."""
    return dict(identity_of(config, config.model_config, accepted))


# The tables


def fields_in(name: str) -> set[str]:
    """The fields of a class of this vLLM's."""
    return {field.name for field in dataclasses.fields(getattr(vllm_configs, name))}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_this_vllm_has_a_row(name: str) -> None:
    """A release with a new one fails here: find out what it decides, and say so in the table."""
    assert fields_in(name) - TABLES[name].keys() == set()


def test_the_document_shows_the_tables() -> None:
    found = {
        name: {
            field: fate
            for fields, fate in ROW.findall(rows)
            for field in re.findall(r"\w+", fields)
        }
        for name, rows in SECTION.findall(DOCUMENT.read_text())
    }
    assert found == {**TABLES, "hf_config": HF}


def owners(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    model = config.model_config
    object.__setattr__(model, "multimodal_config", model.multimodal_config or MultiModalConfig())
    yield from (
        ("VllmConfig", config), ("ModelConfig", model), ("CacheConfig", config.cache_config),
        ("AttentionConfig", config.attention_config), ("MambaConfig", config.mamba_config),
        ("MultiModalConfig", model.multimodal_config),
    )  # fmt: skip


def test_each_compared_field_changes_the_identity_and_no_other_does(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wrong = []
    for table, owner in owners(config):
        before = told(config)
        for field in dataclasses.fields(owner):
            fate = TABLES[table][field.name]
            if fate.startswith(("its own", "what is derived")) or "scale_path" in field.name:
                continue
            kept = getattr(owner, field.name, None)
            object.__setattr__(owner, field.name, "other")
            try:
                changes = told(config) != before
            except Exception:  # noqa: BLE001  # it is looked at, at least
                changes = True
            object.__setattr__(owner, field.name, kept)
            if changes != fate.startswith("compared"):
                wrong.append((table, field.name, fate))
    assert wrong == []


def test_a_field_that_no_table_has_is_compared(tmp_path: Path) -> None:
    assert is_compared(HF, "a_new_field")
    one, other = config_of(tmp_path), config_of(tmp_path, name="other", a_new_field=3)
    assert told(other) == {**told(one), "hf.a_new_field": "3"}


# The model's own configuration


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        {"attention_bias": True},
        {"quantization_config": {"quant_method": "other", "bits": 4}},
    ],
    ids=str,
)
def test_a_change_of_the_models_configuration_is_named(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    one = config_of(tmp_path)
    for name, value in changes.items():
        setattr(one.model_config.hf_config, name, value)
    differing = {
        name
        for name in {*told(one), *told(config_of(tmp_path, name="other"))}
        if told(one).get(name) != told(config_of(tmp_path, name="other")).get(name)
    }
    [changed] = changes
    assert differing
    assert all(name.startswith(f"hf.{changed}") for name in differing)


def test_a_nested_configuration_is_compared_by_its_own_defaults(tmp_path: Path) -> None:
    text = json.loads((write_model_config(tmp_path) / "config.json").read_text())
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**small)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text), vision_config=vision
    )
    around = config_of(tmp_path)
    around.model_config.hf_config = config
    found = told(around)
    assert found["hf.vision_config.hidden_size"] == "32"
    assert found["hf.text_config.vocab_size"] == "1000"
    assert "hf.vision_config.patch_size" not in found
    assert not any(
        "transformers_version" in name or "dtype" in name.split(".")[1:] for name in found
    )


def test_what_other_releases_of_transformers_write_out_does_not_refuse(tmp_path: Path) -> None:
    """A release writes each field that it knows, and its own number."""
    config = config_of(tmp_path)
    before = told(config)
    hf_config: Any = config.model_config.hf_config
    hf_config.transformers_version = "4.0"

    class Newer(type(hf_config)):  # type: ignore[misc]
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            self.knows_more = 3

    Newer.__name__ = type(hf_config).__name__
    newer = Newer(**hf_config.to_dict())
    config.model_config.hf_config = newer
    assert told(config) == before


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_variable_that_chooses_a_format_is_compared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"`{name}`" in DOCUMENT.read_text()
    config = config_of(tmp_path)
    monkeypatch.delenv(name, raising=False)
    before = told(config)
    monkeypatch.setenv(name, "1")
    assert told(config) == {**before, f"env.{name}": "1"}


# Values


@pytest.mark.parametrize("value", ["x" * 1000, list(range(1000)), {"a": "y" * 1000}], ids=type)
def test_a_long_value_is_cut_and_still_compared(value: Any) -> None:
    assert len(text_of(value)) <= MAX_VALUE
    longer = value + value[-1:] if not isinstance(value, dict) else {**value, "b": 1}
    assert text_of(longer) != text_of(value)


def test_a_value_is_the_same_text_in_each_process() -> None:
    for value in ({"b": 1, "a": {3, 1, 2}}, Path, object):
        assert "0x" not in text_of(value)
    assert text_of({"b": 1, "a": 2}) == text_of({"a": 2, "b": 1})


# What an operator accepts


@pytest.mark.parametrize("accepted", ["hf.rope_parameters", "hf.rope_parameters.rope_theta"])
def test_an_accepted_difference_covers_what_is_below_it(accepted: str, tmp_path: Path) -> None:
    one = config_of(tmp_path)
    other = config_of(tmp_path, name="o", rope_parameters={"rope_type": "default", "rope_theta": 5})
    assert told(one) != told(other)
    assert told(one, accepted) == told(other, accepted)
    assert told(one, "hf.rope") == told(one)
