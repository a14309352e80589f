"""Which MoE families does the installed transformers have, and how does one get a tiny random model of each?

A family is a package of ``transformers.models`` whose modules own experts. They are found by reading the packages, so a
family that a new release brings is found without a change here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from perseus_compile.moe_modules import find_moe_modules
from perseus_compile.testing.models import randomize_constants

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 128
NUM_LAYERS = 2
# How classes that own experts end where their structure does not tell.
_NAMES = ("Experts", "MoE", "Moe")

_Sizes: TypeAlias = "tuple[tuple[str, int], ...]"

# The size of every integer field whose name matches, if its default is larger; the first pattern that matches counts.
# Names for the same thing vary little between families.
_SIZES: _Sizes = (
    (r"vocab", VOCABULARY),
    (r"index_topk$", 8),
    (r"index_kpool", 2),
    (r"shared_experts$", 1),
    (r"per_tok|top_?k$|moe_k$", 2),
    (r"topk_group$|first_k_dense|num_dense_layers", 1),
    (r"n_groups?$|num_expert_group|o_groups", 2),
    (r"experts?$|zero_expert_num", 8),
    (r"(moe|expert).*(intermediate|hidden).*size", 32),
    (r"intermediate|ffn|d_ff", 128),
    (r"lora_rank|gate_rank|gated_norm_rank|hc_lowrank", 16),
    (r"rope_head_dim|rotary_dim", 8),
    (r"num_(key_value|kv|key)_heads|swa_num_key_value_heads|linear_num_key_heads", 2),
    (r"heads$", 4),
    (r"head_dim|d_head|d_state|state_size|d_kv|kv_channels|chunk_size$|block_size$|ple_embed_dim", 16),
    (r"router_hidden_size|hidden_size_per_layer", 16),
    (r"hidden_size|d_model", 64),
    (r"num_hidden_layers|n_layers$|num_layers|(encoder|decoder)_layers$", NUM_LAYERS),
    (r"num_hash_layers|nextn_predict_layers", 1),
    (r"sparse_step", 1),
    (r"sinkhorn_iters", 2),
    (r"max_position|model_max_length|rel_extent", 256),
)
# Without them a random model would stop or pad at random.
_FIELDS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    # About 1 / sqrt(hidden size): with the usual 0.02 the experts of so narrow a model add almost nothing to the
    # residual stream, and a wrong expert would hide behind it.
    "initializer_range": 0.1,
}
# Tried in turn: small heads; as many key as query heads; heads as wide as by default, where rotary sections are fixed.
_ATTENTION_SIZES: tuple[_Sizes, ...] = (
    (),
    ((r"num_(key_value|kv)_heads", 4), (r"^head_dim", 8)),
    ((r"num_(key_value|kv)_heads", 4), (r"head_dim|rotary_dim", sys.maxsize)),
    ((r"head_dim|rotary_dim", sys.maxsize),),
)
# Fields without which the default configuration describes no model with experts, or none of two layers.
_FIELDS_OF_FAMILY: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1},
    "glm4v_moe_text": {"head_dim": 128},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "step3p5": {"sliding_window": 8},
}
# Models that have no embedding of token ids.
_READ_EMBEDDINGS = ("qwen3_omni_moe_talker_text",)


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of transformers that share one configuration and own experts.

    Attributes:
        name: the model_type of the configuration.
        decorated: whether its experts run through transformers' choice of implementations (grouped_mm, batched_mm).
        model_classes: the classes that may own the experts, the most likely first.
    """

    name: str
    decorated: bool
    model_classes: tuple[type[PreTrainedModel], ...]


@functools.cache
def find_families() -> tuple[Family, ...]:
    """Every family of the installed transformers, by name."""
    import transformers.models

    root = Path(next(iter(transformers.models.__path__)))
    found = (family for file in root.glob("*/modeling_*.py") for family in _families_of(file))
    return tuple(sorted(found, key=lambda family: family.name))


def _families_of(file: Path) -> Iterator[Family]:
    from transformers import PreTrainedModel

    if "experts" not in file.read_text():
        return
    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    by_config: dict[type[PreTrainedConfig], list[type[PreTrainedModel]]] = {}
    for model in own:
        is_model = issubclass(model, PreTrainedModel) and "forward" in vars(model)
        config_class = getattr(model, "config_class", None)
        if is_model and isinstance(config_class, type):
            by_config.setdefault(config_class, []).append(model)
    of_models = set(by_config)
    for config, models in by_config.items():
        parts = [part for part in config.sub_configs.values() if part not in of_models]
        if any(map(_counts_experts, (config, *parts))):
            yield Family(config.model_type, any(map(is_decorated, own)), tuple(sorted(models, key=_preference)))


def is_decorated(experts: type) -> bool:
    """Whether transformers' decorator lets the class choose at each call how its experts run."""
    return hasattr(experts, "_apply_gate") and hasattr(getattr(experts, "forward", None), "__wrapped__")


def _counts_experts(config: type) -> bool:
    return any("experts" in name for name in inspect.signature(config).parameters)


def _preference(model: type[PreTrainedModel]) -> tuple[bool, ...]:
    name = model.__name__
    return not name.endswith("ForCausalLM"), not name.endswith("Model")


def _reads_token_ids(model: type[PreTrainedModel]) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


def tiny_model(family: Family, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of ``family`` of some 100,000 parameters that owns experts and runs, in eval mode.

    Raises:
        LookupError: none of the family's classes gives one; says what they answered.
    """
    readers = [each for each in family.model_classes if _reads_token_ids(each)]
    if not readers:
        raise LookupError(f"no model of {family.name} reads token ids, so that none is built here")
    answers = []
    for model_class, attention in itertools.product(readers, _ATTENTION_SIZES):
        try:
            config = _tiny_config(family, model_class.config_class, attention)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed)
                with _unwritten_is_nan():
                    model = model_class._from_config(config, dtype=dtype)
                randomize_constants(model, std=_FIELDS["initializer_range"])
                model.eval()(**inputs_of(model, num_tokens=2))
        except Exception as error:  # configurations check their fields in many ways, forward even more
            answers.append(f"{model_class.__name__}: {error}")
            continue
        if experts_of(model):
            return model
        answers.append(f"{model_class.__name__} owns no experts")
    said = "; ".join(dict.fromkeys(answers))
    raise LookupError(f"no class of {family.name} gives a tiny model with experts: {said}")


@contextlib.contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    """Inside, torch.empty gives NaN, so that parameters which a model forgets to initialise are found."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Its setting fill_uninitialized_memory is on by default.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)


def inputs_of(model: PreTrainedModel, *, num_tokens: int, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for ``model``'s forward: random token ids, and no cache."""
    generator = torch.Generator().manual_seed(seed)
    if model.config.model_type in _READ_EMBEDDINGS:
        x_BTD = torch.randn(batch, num_tokens, model.config.hidden_size, generator=generator)
        return {"inputs_embeds": x_BTD.to(model.dtype), "use_cache": False}
    ids = torch.randint(1, VOCABULARY - 16, (batch, num_tokens), generator=generator)
    names = inspect.signature(model.forward).parameters
    decoder = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
    return {"input_ids": ids, "use_cache": False, **decoder}


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that own experts: decorated by transformers, or of a known structure or name."""
    decorated = [module for module in model.modules() if is_decorated(type(module))]
    structured = [found.module for found in find_moe_modules(model)]
    return decorated or structured or [each for each in model.modules() if type(each).__name__.endswith(_NAMES)]


def _tiny_config(family: Family, config_class: type[PreTrainedConfig], attention: _Sizes) -> PreTrainedConfig:
    """The default configuration with every size made small and ``NUM_LAYERS`` of its layers, the last among them."""
    fields = _shrink(config_class(), (*attention, *_SIZES))
    return config_class(**{**fields, **_FIELDS_OF_FAMILY.get(family.name, {})})


def _shrink(config: PreTrainedConfig, sizes: _Sizes) -> dict[str, Any]:
    names = inspect.signature(type(config)).parameters
    values = {name: _field(config, name, parameter.default) for name, parameter in names.items()}
    depth = next((values[name] for name in ("num_hidden_layers", "num_layers", "n_layers") if name in values), None)
    fields = {}
    for name, value in values.items():
        if name in _FIELDS:
            fields[name] = _FIELDS[name]
        elif type(value) is int:
            fields[name] = _small(name, value, sizes)
        elif isinstance(value, bool):
            fields[name] = value or name in ("enable_moe_block", "is_moe")
        elif value is None and re.search("experts|moe_intermediate", name):
            fields[name] = _small(name, sys.maxsize, sizes)
        elif isinstance(value, list):
            fields[name] = _shorter(name, value, depth, sizes)
        elif hasattr(value, "to_dict"):
            fields[name] = copy.deepcopy(value)
            for part, small in _shrink(value, sizes).items():
                setattr(fields[name], part, small)
        elif isinstance(value, (str, float, dict)):
            fields[name] = value
    return fields


def _field(config: PreTrainedConfig, name: str, default: Any) -> Any:
    try:
        return getattr(config, name, default)
    except RuntimeError:  # layers differ in it
        return default


def _small(name: str, value: int, sizes: _Sizes) -> int:
    if name.endswith(("token_id", "token_index")):
        return min(value, VOCABULARY - 1)
    size = next((size for pattern, size in sizes if re.search(pattern, name)), value)
    return min(value, size)


def _shorter(name: str, values: list[Any], depth: int | None, sizes: _Sizes) -> list[Any]:
    """One entry for each of the first layers and the last; or the layers that are left, in a list of layers."""
    if len(values) == depth:
        return [*values[: NUM_LAYERS - 1], values[-1]]
    if name.endswith("_layers"):
        return [layer for layer in values if layer < NUM_LAYERS - 1]
    return [_small(name, value, sizes) if type(value) is int else value for value in values]
