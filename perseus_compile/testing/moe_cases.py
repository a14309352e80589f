"""Which MoE layers are measured, and what have others reached on them? Data only.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from perseus_compile.facts import ExpertsSpec

BYTES_PER_NUMBER = {"bfloat16": 2, "float32": 4}
# What `perseus bench moe` measures on a device if nothing else is asked for.
TOKENS = {"cuda": (1, 16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384), "cpu": (1, 4, 16, 64, 256, 1024)}
DTYPES = {"cuda": ("bfloat16",), "cpu": ("bfloat16", "float32")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One MoE layer: the block of the Hugging Face architecture ``model_type``, with D, F, E and K."""

    name: str
    model_type: str
    model_width: int
    expert_width: int
    num_experts: int
    top_k: int

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the architecture's configuration, which keeps names that it does not know and never reads them."""
        return {
            "hidden_size": self.model_width,
            "intermediate_size": self.expert_width,
            "moe_intermediate_size": self.expert_width,
            "num_experts": self.num_experts,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            # So that numbers stay near 1 from layer to layer.
            "initializer_range": self.model_width**-0.5,
            # The rest of the model is built as well and not used.
            **{"vocab_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        }

    @property
    def experts(self) -> ExpertsSpec:
        """What the experts of the block compute."""
        if self.model_type == "gpt_oss":
            return ExpertsSpec(
                weight_layout="in_out",
                gate_layout="interleaved",
                activation="clamped_swiglu",
                activation_params=(1.702, 7.0),
                num_experts=self.num_experts,
            )
        return ExpertsSpec(
            weight_layout="out_in", gate_layout="concatenated", activation="silu", num_experts=self.num_experts
        )

    def flops(self, num_tokens: int) -> int:
        """Three linear maps per routed row, two operations per weight."""
        return 6 * num_tokens * self.top_k * self.model_width * self.expert_width

    def bytes(self, num_tokens: int, num_hit: int, dtype: str) -> int:
        """Weights of the experts that were hit, read once; x read once, the output written once."""
        weights = 3 * num_hit * self.model_width * self.expert_width
        return (weights + 2 * num_tokens * self.model_width) * BYTES_PER_NUMBER[dtype]

    def copied_bytes(self, num_tokens: int, dtype: str) -> int:
        """What batched_mm copies for the larger of its two products."""
        return 2 * num_tokens * self.top_k * self.model_width * self.expert_width * BYTES_PER_NUMBER[dtype]


def _case(name: str, model_type: str, model_width: int, expert_width: int, num_experts: int, top_k: int) -> Case:
    return Case(
        name=name,
        model_type=model_type,
        model_width=model_width,
        expert_width=expert_width,
        num_experts=num_experts,
        top_k=top_k,
    )


# gpt-oss-120b has its widths in a plain gated layer, without biases and clamp, as the rivals were measured;
# gpt-oss-120b-as-is is the layer of the model. dsv3-slice is what one of eight ranks holds of DeepSeek-V3's routed
# experts, with a softmax router and without the shared expert, as the rivals were measured.
GPU_CASES = (
    _case("qwen3-30b", "qwen3_moe", 2048, 768, 128, 8),
    _case("mixtral-8x7b", "mixtral", 4096, 14336, 8, 2),
    _case("olmoe", "olmoe", 2048, 1024, 64, 8),
    _case("gpt-oss-120b", "qwen3_moe", 2880, 2880, 128, 4),
    _case("gpt-oss-120b-as-is", "gpt_oss", 2880, 2880, 128, 4),
    _case("dsv3-slice", "qwen3_moe", 7168, 2048, 32, 8),
)
# Small enough for a CPU: 100 million parameters.
CPU_CASES = (_case("small", "qwen3_moe", 1024, 512, 64, 8),)
CASES_OF_DEVICE = {"cuda": GPU_CASES, "cpu": CPU_CASES}
CASES = {case.name: case for case in (*GPU_CASES, *CPU_CASES)}


class Rival(NamedTuple):
    """Milliseconds that others need for a layer, BF16 forward, L2 cold."""

    layer: float  # the fastest whole layer, router included
    gemms: float  # the fastest two GEMMs alone, whoever has them
    estimate: float  # modelled: the greater of a pure read of the weights hit and the FLOPs at the rate of dense GEMMs


# Measured on one NVIDIA H200 on 2026-11-30 (torch 2.11.0+cu130, CUDA-graph replay, 256 MiB written before each, rivals
# of a cell interleaved): vLLM's Triton fused MoE, DeepGEMM's grouped BF16 GEMM with Triton kernels around it, and
# torch._grouped_mm chains. Another machine than ours; machines differ by 3 to 7 % (docs/measured.md).
RIVALS_GPU = "NVIDIA H200"
_RIVAL_TOKENS = (1, 16, 128, 512, 1024, 4096, 8192, 16384)
_RIVALS = {
    "qwen3-30b": (
        *((0.0491, 0.0350, 0.0277), (0.213, 0.194, 0.176), (0.317, 0.296, 0.270), (0.345, 0.317, 0.271)),
        *((0.393, 0.351, 0.272), (0.755, 0.613, 0.392), (1.243, 0.980, 0.785), (2.342, 1.833, 1.570)),
    ),
    "mixtral-8x7b": (
        *((0.197, 0.184, 0.164), (0.657, 0.642, 0.611), (0.691, 0.666, 0.611), (0.965, 0.919, 0.613)),
        *((1.550, 1.478, 0.916), (4.62, 4.37, 4.23), (8.65, 8.17, 8.45), (17.6, 16.7, 16.9)),
    ),
    "olmoe": (
        *((0.0556, 0.0427, 0.0343), (0.191, 0.169, 0.150), (0.234, 0.215, 0.185), (0.264, 0.234, 0.186)),
        *((0.324, 0.276, 0.187), (0.822, 0.669, 0.523), (1.499, 1.211, 1.046), (2.88, 2.31, 2.09)),
    ),
    "gpt-oss-120b": (
        *((0.0804, 0.0670, 0.0561), (0.631, 0.617, 0.583), (1.437, 1.415, 1.351), (1.519, 1.485, 1.363)),
        *((1.571, 1.524, 1.364), (2.17, 2.02, 1.37), (3.34, 3.03, 2.07), (5.87, 5.28, 4.78)),
    ),
    "dsv3-slice": (
        *((0.195, 0.181, 0.164), (0.643, 0.621, 0.592), (0.702, 0.675, 0.612), (0.911, 0.845, 0.614)),
        *((1.557, 1.444, 0.916), (4.67, 4.23, 4.23), (9.05, 8.30, 8.45), (18.9, 16.8, 16.9)),
    ),
}
RIVALS = {
    (case, num_tokens): Rival(*milliseconds)
    for case, figures in _RIVALS.items()
    for num_tokens, milliseconds in zip(_RIVAL_TOKENS, figures, strict=True)
}
