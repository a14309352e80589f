"""Which variants must always compile? The forms that known models have, at most 40; the tests compile every one.

No image is shipped: a user's machine compiles what a call needs, whether it is listed here or not.
"""

from __future__ import annotations

from perseus_compile.jit.spec import TILE_CONFIGS, VariantSpec, spec_for

MAX_SHIPPED = 40
FORMS = (
    ("out_in", "concatenated", "silu"),  # Mixtral, Qwen, OLMoE, DeepSeek, GLM
    ("out_in", "concatenated", "gelu"),
    ("out_in", "concatenated", "gelu_tanh"),  # Gemma-style gates
    ("out_in", "concatenated", "clamped_swiglu"),
    ("in_out", "concatenated", "silu"),  # Llama 4 style weights
    ("in_out", "interleaved", "clamped_swiglu"),  # gpt-oss
)


def shipped_variants() -> tuple[VariantSpec, ...]:
    """Every form in every tile configuration, and the commonest one with a router.

    Interleaved [E, N, K] weights need no variant of their own.
    """
    experts_alone = [
        spec_for(tiles, weight_layout=weight_layout, gate_layout=gate_layout, activation=activation)
        for weight_layout, gate_layout, activation in FORMS
        for tiles in TILE_CONFIGS
    ]
    weight_layout, gate_layout, activation = FORMS[0]
    with_router = [
        spec_for(tiles, weight_layout=weight_layout, gate_layout=gate_layout, activation=activation, routes=True)
        for tiles, config in TILE_CONFIGS.items()
        if config.may_route
    ]
    return (*experts_alone, *with_router)
