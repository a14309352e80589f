"""How does one get a small random Hugging Face MoE model? Used by tests, the demo and the command line.

Needs transformers (the ``hf`` extra) and nothing from the network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The architectures whose every MoE layer must be rewritten (docs/patterns.md).
MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")

# Sizes that many configurations share; a configuration keeps names that it does not know and never reads them.
_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # About 1 / sqrt(hidden_size): with the usual 0.02 the experts of so narrow a model add almost nothing to the
    # residual stream, and a wrong expert would hide behind it.
    "initializer_range": 0.1,
}

# Multi-head latent attention has no grouped heads, and its head_dim is the rotary part.
_SMALL_BY_TYPE: dict[str, dict[str, Any]] = {"deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8}}

# What a config.json says about trained weights and about the code that wrote it means nothing for random weights.
_DROPPED = ("architectures", "auto_map", "dtype", "model_type", "quantization_config", "torch_dtype")


def config_for(
    model_type: str, *, num_layers: int, base: Mapping[str, Any] | None = None, **sizes: Any
) -> PreTrainedConfig:
    """A configuration with ``num_layers`` decoder layers, at least one of them a MoE layer where there are two.

    Args:
        model_type: as in a Hugging Face ``config.json``, for example ``qwen3_moe``.
        base: the fields of a ``config.json``; without it the defaults of ``model_type`` hold.
        sizes: fields that replace both.
    """
    from transformers import AutoConfig

    fields = {key: value for key, value in (base or {}).items() if key not in _DROPPED}
    per_layer = fields.get("num_hidden_layers")
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == per_layer:
            fields[key] = value[:num_layers]
    # A random model would stop at random.
    fields |= {"num_hidden_layers": num_layers, "pad_token_id": 0, "eos_token_id": None}
    # DeepSeek-V3 and its relatives start with this many dense layers.
    return AutoConfig.for_model(model_type, **{**fields, "first_k_dense_replace": 1, **sizes})


def small_sizes(model_type: str) -> dict[str, Any]:
    """Fields for ``config_for`` with which a model of ``model_type`` has about 100,000 parameters."""
    return {**_SMALL, **_SMALL_BY_TYPE.get(model_type, {})}


def random_causal_lm(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    implementation: str | None = "grouped_mm",
    seed: int = 0,
) -> PreTrainedModel:
    """A causal LM with random weights, drawn on ``device``, in eval mode.

    Tensors that the model initialises to zero (expert biases, correction biases) are drawn too, since a zero would
    hide that a bias is dropped. The global random state is left as it was.

    Args:
        config: it is copied, so that the model can change its own.
        implementation: how the experts run, for ``set_experts_implementation``; None keeps the model's choice.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device(device)
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        randomize_constants(model, std=getattr(config, "initializer_range", 0.02))
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model.eval()


def tiny_causal_lm(
    model_type: str,
    *,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    implementation: str | None = "grouped_mm",
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A tiny random causal LM of a Hugging Face architecture; see ``config_for`` and ``random_causal_lm``.

    DeepSeek-V3 and GLM-4-MoE make the first of the layers dense.
    """
    config = config_for(model_type, num_layers=num_layers, **{**small_sizes(model_type), **overrides})
    return random_causal_lm(config, dtype=dtype, implementation=implementation, seed=seed)


def random_tokens(model: PreTrainedModel, shape: tuple[int, int], *, seed: int = 0) -> torch.Tensor:
    """Token ids of ``shape`` (sequences, tokens) that ``model`` knows."""
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomize_constants(model: nn.Module, *, std: float) -> None:
    """Draws every floating-point tensor of ``model`` that is all zero, or was never written."""
    for tensor in model.state_dict(keep_vars=True).values():
        is_unwritten = tensor.is_floating_point() and not tensor.isfinite().all()
        is_zero = tensor.is_floating_point() and tensor.numel() > 1 and not tensor.any()
        if is_unwritten or is_zero:
            tensor.normal_(std=std)
