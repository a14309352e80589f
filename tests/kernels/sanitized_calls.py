"""Small calls of the fused kernel, one of each kind of tile, for a checker that follows every access.

compute-sanitizer --tool memcheck python tests/kernels/sanitized_calls.py
"""

from __future__ import annotations

import torch
from moe_case import TOLERANCE, make_case, reference, relative_error

from perseus_compile import fused_router
from perseus_compile.facts import RoutingSpec
from perseus_compile.jit import compiler
from perseus_compile.jit.moe_kernel import LaunchRouter, MoeKernel
from perseus_compile.jit.spec import spec_for

# tiles, form, (D, F, E, K, T): one CTA sorts 8, 512 and 2700 rows, the last in exchange with the others
CALLS = (
    ("few8", ("out_in", "concatenated", "silu"), (256, 72, 8, 4, 2)),
    ("few16", ("in_out", "interleaved", "clamped_swiglu"), (200, 72, 5, 3, 17)),
    ("few64", ("out_in", "concatenated", "gelu"), (136, 128, 16, 4, 128)),
    ("many128", ("in_out", "concatenated", "silu"), (256, 136, 4, 3, 900)),
    ("many128", ("out_in", "concatenated", "silu"), (520, 136, 4, 2, 130)),
)
ROUTER = RoutingSpec(
    top_k=4,
    renormalize=True,
    router_dtype=torch.bfloat16,
    score_dtype=torch.float32,
    weights_dtype=torch.float32,
)


def experts(tiles: str, form: tuple[str, str, str], shape: tuple[int, int, int, int, int]) -> None:
    weight_layout, gate_layout, activation = form
    case = make_case(*shape, weight_layout=weight_layout, gate_layout=gate_layout, activation=activation, bias=True)
    kernel = MoeKernel(compiler.build(spec_for(tiles, **_words(form))), 0)
    out_TD = kernel.prepare(*case.args, case.spec, num_column_groups=2).run(case.x, case.ids, case.weights)  # type: ignore[arg-type]
    assert relative_error(out_TD, reference(case)) < TOLERANCE


def layer(num_tokens: int) -> None:
    case = make_case(256, 72, 16, ROUTER.top_k, num_tokens, id_dtype=torch.int32)
    weight_ED = torch.randn(16, 256, device="cuda").mul_(256**-0.5).bfloat16()
    params = fused_router.route_params(ROUTER, num_tokens, 16, torch.bfloat16, None)
    kernel = MoeKernel(compiler.build(spec_for("few8", **_words(CALLS[0][1]), routes=True)), 0)
    prepared = kernel.prepare(*case.args, case.spec, router=LaunchRouter(weight_ED, None, params))  # type: ignore[arg-type]
    assert prepared.run(case.x, None, None).isfinite().all()


def _words(form: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("weight_layout", "gate_layout", "activation"), form, strict=True))


if __name__ == "__main__":
    for call in CALLS:
        experts(*call)
    for count in (1, 8, 33):
        layer(count)
    torch.cuda.synchronize()
    print("every call ran and was right")
