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
from vllm import envs
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.platforms import current_platform

from p2p_engine.connector.identity import MAX_VALUE, default_in, identity_of, text_of
from p2p_engine.connector.identity_fields import COMPARED, ENVIRONMENT, HF, TABLES, is_compared
from tests.doubles.vllm_config import make_config, write_model_config

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# Of the compared fields, in vLLM 0.29 to 0.33.
DEFAULTS: dict[str, dict[str, str]] = {
    "ModelConfig": {
        "code_revision": "null", "dtype": "auto", "model_class_overrides": "{}",
        "quantization_config": "null",
    },
    "AttentionConfig": {
        "disable_flashinfer_q_quantization": "false", "indexer_sparse_logits": "false",
        "use_non_causal": "false", "use_prefill_query_quantization": "false",
    },
    "MambaConfig": {"enable_stochastic_rounding": "false"},
    "MultiModalConfig": {
        "media_io_kwargs": "{}", "mm_encoder_attn_dtype": "null", "mm_hasher_algorithm": "blake3",
        "video_pruning_method": "evs", "video_pruning_rate": "null",
    },
    "LoRAConfig": {
        "enable_moe_shared_loras": "false", "enable_tower_connector_lora": "false",
        "target_modules": "null",
    },
}  # fmt: skip
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


def test_the_defaults_of_this_vllm_are_those_of_the_others() -> None:
    """A default counts as absent, so it must be one and the same in each release. A release with
    another default fails here: then the field has to be told whatever it is."""
    assert {
        table: {
            field.name: text_of(default_in(field))
            for field in dataclasses.fields(getattr(vllm_configs, table))
            if rows.get(field.name) == COMPARED
        }
        for table, rows in TABLES.items()
    } == {table: DEFAULTS.get(table, {}) for table in TABLES}


def owners(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    model = config.model_config
    object.__setattr__(model, "multimodal_config", model.multimodal_config or MultiModalConfig())
    object.__setattr__(config, "lora_config", config.lora_config or LoRAConfig())
    yield from (
        ("VllmConfig", config), ("ModelConfig", model), ("CacheConfig", config.cache_config),
        ("AttentionConfig", config.attention_config), ("MambaConfig", config.mamba_config),
        ("MultiModalConfig", model.multimodal_config), ("KernelConfig", config.kernel_config),
        ("LoRAConfig", config.lora_config),
    )  # fmt: skip


def test_each_compared_field_changes_the_identity_and_no_other_does(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wrong = []
    for table, owner in owners(config):
        before = told(config)
        for field in dataclasses.fields(owner):
            fate = TABLES[table][field.name]
            if fate != COMPARED and not fate.startswith("left out"):
                continue  # test_connector_pairs.py changes these
            kept = getattr(owner, field.name, None)
            object.__setattr__(owner, field.name, "other")
            try:
                changes = told(config) != before
            except Exception:  # noqa: BLE001  # it is looked at, at least
                changes = True
            object.__setattr__(owner, field.name, kept)
            if changes != (fate == COMPARED):
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
    assert not any("rope" in name for name in found)
    assert "hf.vision_config.patch_size" not in found
    assert not any(
        "transformers_version" in name or "dtype" in name.split(".")[1:] for name in found
    )


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="an older transformers")
def test_a_field_that_each_layer_has_for_itself_is_compared(tmp_path: Path) -> None:
    """Such a configuration refuses to say the field for all layers."""
    config = config_of(tmp_path)
    config.model_config.hf_config = transformers.Gemma4TextConfig()
    before = told(config)
    config.model_config.hf_config = transformers.Gemma4TextConfig(num_hidden_layers=12)
    found = told(config)
    assert found["hf.num_hidden_layers"] == "12"
    assert not any("0x" in text for text in {**before, **found}.values())


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


def test_a_value_that_transformers_has_renamed_is_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    hf_config: Any = config.model_config.hf_config
    hf_config.layer_types = ["deepseek_sparse_attention", "attention"]
    old = told(config)
    hf_config.layer_types = ["indexed_attention", "full_attention"]
    assert told(config) == old


def test_a_default_that_an_older_transformers_does_not_know_is_none_to_it(tmp_path: Path) -> None:
    """GPT-OSS's file has the limit; a release without that field keeps it as it stands."""
    config = config_of(tmp_path)
    hf_config: Any = config.model_config.hf_config

    class Older(type(hf_config)):  # type: ignore[misc]
        model_type = "gpt_oss"

    config.model_config.hf_config = Older(**hf_config.to_dict())
    before = told(config)
    config.model_config.hf_config = Older(**hf_config.to_dict(), swiglu_limit=7.0)
    assert told(config) == before
    config.model_config.hf_config = Older(**hf_config.to_dict(), swiglu_limit=6.0)
    assert told(config) == {**before, "hf.swiglu_limit": "6.0"}


def test_a_class_that_makes_nothing_of_nothing_has_the_defaults_of_all(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    base = told(config)
    hf_config: Any = config.model_config.hf_config

    class Strict(type(hf_config)):  # type: ignore[misc]
        def __init__(self, *, vocab_size: int, **values: Any) -> None:
            super().__init__(vocab_size=vocab_size, **values)

    config.model_config.hf_config = Strict(**hf_config.to_dict())
    found = told(config)
    assert base.keys() <= found.keys()
    every = {f"hf.{name}" for name in transformers.PretrainedConfig().to_dict()}
    assert found.keys() & every == {"hf.architectures", "hf.model_type"}


# The environment


def value_of(name: str) -> str:
    """Another value than the default, as an environment says it."""
    usual = ENVIRONMENT[name]
    named = {
        "VLLM_FLOAT32_MATMUL_PRECISION": "high", "VLLM_MARLIN_INPUT_DTYPE": "fp8",
        "VLLM_MM_HASHER_ALGORITHM": "sha256", "VLLM_ROCM_USE_AITER_MOE_SITUV2": "a8w4",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8", "VLLM_XPU_INC_WNA16_BACKEND": "w4a8",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int8"}',
    }  # fmt: skip
    return named.get(name, "0" if usual is True else "1")


@pytest.fixture(params=[name for name in ENVIRONMENT if name in envs.environment_variables])
def variable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable of this vLLM's, on the platform that looks at it."""
    name: str = request.param
    owner = name.split("_")[1]
    kind = type(current_platform._enum)
    platform = kind[owner] if owner in ("ROCM", "XPU") else kind.CPU
    monkeypatch.setattr(type(current_platform), "_enum", platform)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    monkeypatch.delenv(name, raising=False)
    return name


def test_a_variable_that_chooses_a_format_is_compared_by_what_vllm_makes_of_it(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    before = told(config)
    if "BMM" not in variable:  # vLLM has changed these defaults in 0.33
        assert f"env.{variable}" not in before
    monkeypatch.setenv(variable, "0" if f"env.{variable}" in before else value_of(variable))
    assert told(config) != before


def test_the_document_names_the_variables() -> None:
    named = set(re.findall(r"`(VLLM_\w+)`", DOCUMENT.read_text()))
    assert named >= set(ENVIRONMENT)


@pytest.mark.parametrize("name", ["VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_XPU_INC_WNA16_BACKEND"])
def test_a_variable_of_another_platform_is_not_compared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    before = told(config)
    monkeypatch.setenv(name, value_of(name))
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    assert told(config) == before


def test_a_variable_that_says_the_default_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself sets the first of these when a checkpoint asks for such scales."""
    config = config_of(tmp_path)
    before = told(config)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "HIGHEST")
    assert told(config) == before


# Values


@pytest.mark.parametrize("value", ["x" * 1000, list(range(1000)), {"a": "y" * 1000}], ids=type)
def test_a_long_value_is_cut_and_still_compared(value: Any) -> None:
    assert len(text_of(value)) <= MAX_VALUE
    longer = value + value[-1:] if not isinstance(value, dict) else {**value, "b": 1}
    assert text_of(longer) != text_of(value)


def test_a_value_is_the_same_text_in_each_process() -> None:
    class Odd:
        def __init__(self) -> None:
            self.size = 3

    for value in ({"b": 1, "a": {3, 1, 2}}, Path, object, Odd(), [Odd()]):
        assert "0x" not in text_of(value)
    assert text_of(Odd()) == text_of({"size": 3})
    assert text_of({"b": 1, "a": 2}) == text_of({"a": 2, "b": 1})


# What an operator accepts


@pytest.mark.parametrize("accepted", ["hf.rope_parameters", "hf.rope_parameters.rope_theta"])
def test_an_accepted_difference_covers_what_is_below_it(accepted: str, tmp_path: Path) -> None:
    one = config_of(tmp_path)
    other = config_of(tmp_path, name="o", rope_parameters={"rope_type": "default", "rope_theta": 5})
    assert told(one) != told(other)
    assert told(one, accepted) == told(other, accepted)
    assert told(one, "hf.rope") == told(one)
