"""What decides a prompt's KV is compared, field by field, and right pairs are not refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import transformers
import vllm
from safetensors.torch import save_file
from vllm import config as vllm_configs
from vllm import envs
from vllm.config import (
    LoRAConfig,
    MultiModalConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.models import ModelRegistry, supports_multimodal
from vllm.platforms import current_platform
from vllm.transformers_utils import repo_utils

from p2p_engine.connector import file_times
from p2p_engine.connector.compat import ALIKE, release_name
from p2p_engine.connector.identity import MAX_VALUE, identity_of, text_of
from p2p_engine.connector.identity_fields import (
    COMPARED,
    ENVIRONMENT,
    HF,
    TABLES,
    is_compared,
)
from p2p_engine.wire.identity import differences, digest_of
from tests.doubles.vllm_config import make_config, write_model_config
from tests.support import eventually

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


def named(one: VllmConfig, other: VllmConfig) -> list[str]:
    """The fields by which two instances refuse each other."""
    return [text.partition(":")[0] for text in differences(told(one), told(other), at_most=99)]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        {"attention_bias": True},
        {"quantization_config": {"quant_method": "other", "bits": 4}},
        {"eos_token_id": 151645},  # it decides KV in models with n-grams
        {"pad_token_id": 3},
        {"initializer_range": 0.01},
        {"head_dim": None},
    ],
    ids=str,
)
def test_a_change_of_the_models_configuration_is_named(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    [changed] = changes
    config = config_of(tmp_path)
    before = told(config)
    write_model_config(tmp_path / "model", **changes)
    found = differences(before, told(config))
    assert found
    assert all(name.startswith(f"hf.{changed}") for name in found)


HARMLESS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"transformers_version": "4.57.1"}, {"transformers_version": "5.19.0"}),
    ({"unsloth_version": "2025.1"}, {}),
    ({"torch_dtype": "float32"}, {"dtype": "float32"}),
    ({"_name_or_path": "/models/one"}, {"_name_or_path": "org/one"}),
    ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
    ({"rope_theta": 1e6}, {"rope_theta": 1000000}),
    ({"use_cache": True}, {"use_cache": False}),
    ({"architectures": ["LlamaForCausalLM"]}, {"architectures": ["LLaMAForCausalLM"]}),
    ({"rope_scaling": None, "quantization_config": None, "sliding_window": None}, {}),
    ({"attention_dropout": 0.0}, {"attention_dropout": 0.1}),
    ({"auto_map": {"AutoConfig": "org/one--config.C"}}, {"auto_map": {"AutoConfig": "config.C"}}),
    ({"a": {"verifier_name_or_path": "x"}}, {"a": {"verifier_name_or_path": "y"}}),
]


@pytest.mark.parametrize(("one", "other"), HARMLESS, ids=str)
def test_what_files_say_in_two_ways_pairs(
    one: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM need not know such a model: it has resolved the file as that was before."""
    config = config_of(tmp_path)
    identities = []
    for said in (one, other):
        write_model_config(tmp_path / "model", **said)
        identities.append(told(config))
    assert identities[0] == identities[1]


def test_another_class_of_the_same_file_pairs(tmp_path: Path) -> None:
    """Releases have other classes of one model, with other fields, names and defaults; and a
    model's code may write into the object."""
    config = config_of(tmp_path)
    before = told(config)
    hf_config: Any = config.model_config.hf_config

    class Other(type(hf_config)):  # type: ignore[misc]
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            self.layer_types = ["linear_attention"]
            self.knows_more = 3

    config.model_config.hf_config = Other(architectures=hf_config.architectures)
    assert told(config) == before
    hf_config.max_model_len = 8192  # as MiniMax-M2's model does
    config.model_config.hf_config = hf_config
    assert told(config) == before


def test_two_writings_of_one_configuration_are_refused_by_name(tmp_path: Path) -> None:
    """Only vLLM's object would say that they are one, and it is another in each release."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    one, other = config_of(tmp_path), config_of(tmp_path, name="other", rope_parameters=rope)
    assert named(one, other) == ["hf.rope_parameters.rope_theta", "hf.rope_parameters.rope_type"]
    accepted = "hf.rope_parameters"
    assert told(one, accepted) == told(other, accepted)


LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 999,
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "dtype": "float16",
    },
    "quantization_config": {"quant_method": "other", "input_tensors": {"dtype": "fp4"}},
}  # fmt: skip


def llava_of(folder: Path, **changes: Any) -> VllmConfig:
    """Vision and text, each with a configuration of its own; vLLM does not know the method."""
    config = config_of(folder)
    text = json.loads((folder / "model" / "config.json").read_text())
    write_model_config(folder / "model", text_config=text, **{**LLAVA, **changes})
    config.model_config.hf_config = transformers.AutoConfig.from_pretrained(folder / "model")
    return config


def test_of_a_configuration_inside_no_dtype_is_told_and_of_a_quantization_it_is(
    tmp_path: Path,
) -> None:
    found = told(llava_of(tmp_path))
    assert found["hf.vision_config.hidden_size"] == "32"
    assert found["hf.text_config.vocab_size"] == "1000"
    assert [name for name in found if name.endswith("dtype")] == [
        "dtype", "hf.quantization_config.input_tensors.dtype",
    ]  # fmt: skip


def test_what_is_laid_over_a_file_is_what_the_file_might_say(tmp_path: Path) -> None:
    """A configuration inside is changed by its fields; another mapping is replaced."""
    laid = llava_of(tmp_path)
    laid.model_config.hf_overrides = {
        "image_token_index": 7, "vision_config": {"patch_size": 7}, "quantization_config": {"a": 1},
    }  # fmt: skip
    over = told(laid)
    vision = {**LLAVA["vision_config"], "patch_size": 7}  # type: ignore[dict-item]
    changes = {"image_token_index": 7, "vision_config": vision, "quantization_config": {"a": 1}}
    assert over == told(llava_of(tmp_path, **changes))
    assert over != told(llava_of(tmp_path))


def test_a_function_over_the_configuration_is_told_by_what_it_makes(tmp_path: Path) -> None:
    """What it does is not seen, so the whole object is compared, with its class's defaults."""
    config = config_of(tmp_path)
    before, by_hand = told(config), config_of(tmp_path)
    by_hand.model_config.hf_overrides = lambda made: made
    found = told(by_hand)
    assert found["hf"] == "as resolved"
    assert found["hf.rms_norm_eps"] == "1e-06"
    assert digest_of(found) != digest_of(before)
    setattr(by_hand.model_config.hf_config, "rms_norm_eps", 0.5)  # noqa: B010
    assert told(by_hand)["hf.rms_norm_eps"] == "0.5"


@pytest.mark.parametrize("missing", ["config_format", "model"])
def test_where_no_file_can_be_had_the_object_is_compared(missing: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    object.__setattr__(config.model_config, missing, "other")
    assert told(config)["hf"] == "as resolved"


def test_of_a_draft_vllm_makes_the_same_of_the_same_file(tmp_path: Path) -> None:
    """It says by a function of its own how; the architecture says what came of it."""
    config = config_of(tmp_path)
    before = told(config)
    of_vllm: Any = SpeculativeConfig.hf_config_override
    for each in (of_vllm, functools.partial(of_vllm, transformers_mtp_overrides=None)):
        config.model_config.hf_overrides = each
        assert told(config) == before
    config.model_config.hf_config.architectures = ["Eagle3LlamaForCausalLM"]
    drafts = {"hf.architectures": '["eagle3llamaforcausallm"]', "vllm": release_name()}
    assert told(config) == {**before, **drafts}
    composed = SpeculativeConfig.compose_draft_hf_overrides(lambda made: made)
    config.model_config.hf_overrides = composed
    assert told(config)["hf"] == "as resolved"


def test_a_draft_with_a_checkpoint_of_its_own_is_compared_by_its_weights(tmp_path: Path) -> None:
    """What names the target's weights says nothing of these."""
    config, found = config_of(tmp_path), []
    for name in ("target", "one", "other"):
        draft = config_of(tmp_path, name="model" if name == "target" else name).model_config
        folder = Path(draft.model)
        save_file({"weight": torch.full((9, 9), len(name))}, folder / "model.safetensors")
        found.append(dict(identity_of(config, draft)))
        assert found[-1] == dict(identity_of(config, draft))
        assert "weights" not in identity_of(config, draft, ["weights"])
    target, one, other = found
    assert target == told(config)
    assert one == {**target, "weights": one["weights"]}
    assert other == {**target, "weights": other["weights"]}
    assert one["weights"] != other["weights"]


CONFIGURATION = [
    "config.json", "hf_quant_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
]  # fmt: skip


@pytest.mark.parametrize("file", CONFIGURATION)
def test_a_configuration_that_changes_while_vllm_starts_equals_no_other(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has read it minutes before; what it was then, nobody can say."""
    config = config_of(tmp_path)
    before, written = told(config), tmp_path / "model" / file
    config_file = tmp_path / "model" / "config.json"
    began = config_file.stat().st_ctime
    monkeypatch.setattr(file_times, "_process_began", lambda _: began)
    assert told(config) == before

    def is_later() -> bool:
        written.write_text(config_file.read_text())
        return written.stat().st_ctime > began

    eventually(is_later)
    one, other = told(config), told(config)
    assert [each.partition(":")[0] for each in differences(one, other)] == ["hf"]
    assert f"start it again: model={written.parent} changed_during_start={written}" in caplog.text
    assert "hf" not in told(config, "hf")


def test_of_a_model_of_modelscope_no_file_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache may have another one of that name."""
    config = config_of(tmp_path)
    written = tmp_path / "model" / "config.json"
    monkeypatch.setattr(repo_utils, "try_get_local_file", lambda *_: written)
    config.model_config.model = "org/model"
    assert "hf" not in told(config)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert told(config)["hf"] == "as resolved"


def test_a_quantization_that_has_a_file_of_its_own_is_compared(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    before = told(config)
    beside = tmp_path / "model" / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    name = "hf.quantization_config.quantization.quant_algo"
    assert told(config) == {**before, name: "FP8"}


def test_of_a_model_in_mistrals_format_its_file_is_compared(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    before = told(config)
    (tmp_path / "model" / "params.json").write_text(json.dumps({"dim": 64}))
    assert told(config) == before
    architectures = config.model_config.hf_config.architectures
    made = transformers.PreTrainedConfig(architectures=architectures)  # as vLLM makes of it
    config.model_config.hf_config = made
    assert told(config) == {**before, "hf.params.dim": "64"}


def test_a_peer_is_told_no_path_and_no_secret(tmp_path: Path) -> None:
    """What may be one is told by a digest, and compared."""
    paths = {"mm_vision_tower": "/home/alice/clip", "some_name_or_path": "/home/alice/secret"}
    config = config_of(tmp_path, **paths)
    config.additional_config = {"token": "sk-live-123", "ca": "/etc/ssl/private.pem"}
    found = told(config)
    text = str(found)
    assert not any(word in text for word in ("alice", "sk-live", "private", "some_name"))
    assert {"additional_config", "hf.mm_vision_tower"} < found.keys()
    config.additional_config = {"token": "sk-live-123", "ca": "/etc/ssl/other.pem"}
    write_model_config(tmp_path / "model", **{**paths, "mm_vision_tower": "/home/bob/clip"})
    other = told(config)
    assert {name for name in found if found[name] != other[name]} == {
        "additional_config", "hf.mm_vision_tower",
    }  # fmt: skip


# vLLM's release


@pytest.mark.parametrize(
    ("here", "there", "pairs"),
    [
        ("0.32.0", "0.32.0+cpu", True),
        ("0.32.0", "0.32.1.post1", True),
        ("0.32.0", "0.33.0", True),
        ("0.31.0", "0.32.0", False),
        ("0.33.0", "0.34.0", False),
        ("0.29.0", "0.30.0", False),  # YaRN
        ("0.34.0", "0.35.0", False),
        ("0.34.0", "0.34.0rc1", False),
        ("0.34.1.dev3+g1234567", "0.34.1.dev3+g7654321", False),
    ],
)
def test_releases_are_compared(
    here: str, there: str, pairs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them compute one file otherwise, and nobody can list where. Of dense models of text,
    the sources of two releases were compared."""
    config, found = config_of(tmp_path), []
    for version in (here, there):
        monkeypatch.setattr(vllm, "__version__", version)
        found.append(told(config))
        assert "vllm" not in told(config, "vllm")
    assert [each.partition(":")[0] for each in differences(*found)] == ([] if pairs else ["vllm"])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model_config.hf_config.architectures", ["MuseGlimmerForCausalLM"]),
        ("model_config.hf_config.architectures", None),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_text_config.sliding_window", 32),
        ("lora_config", LoRAConfig()),
        ("cache_config.cache_dtype", "fp8"),
    ],
)
def test_what_may_be_computed_otherwise_by_the_next_release_is_refused(
    place: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 scales the queries of Muse Glimmer otherwise, of one file."""
    config = config_of(tmp_path)
    *way, name = place.split(".")
    setattr(functools.reduce(getattr, way, config), name, value)
    names = []
    for version in ("0.32.0", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        names.append(told(config)["vllm"])
    assert names == ["0.32", "0.33"]


def test_where_a_quantised_model_may_pair_with_another_the_release_is_no_obstacle(
    tmp_path: Path,
) -> None:
    config, found = config_of(tmp_path), []
    for quantization in (None, "fp8"):
        config.model_config.quantization = quantization
        found.append(told(config, "quantization", "hf.quantization_config"))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_what_is_alike_in_two_releases_is_a_model_of_text(name: str) -> None:
    model_class = ModelRegistry._try_load_model_cls(name)
    assert model_class is not None
    assert not supports_multimodal(model_class)
    assert f"`{name}`" in DOCUMENT.read_text()


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
    if "BMM" not in variable:  # up to 0.32, these are on by default
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
    one, other = (
        config_of(
            tmp_path, name=name, rope_parameters={"rope_type": "default", "rope_theta": theta}
        )
        for name, theta in (("one", 4), ("other", 5))
    )
    assert told(one) != told(other)
    assert told(one, accepted) == told(other, accepted)
    assert told(one, "hf.rope") == told(one)
