"""Does the routing code of the kernels, run by 32 host threads as one warp, choose as the torch ops do? No GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from perseus_compile import fused_router, routing
from perseus_compile.facts import RoutingSpec
from perseus_compile.jit.spec import include_dir

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By experts per lane."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler on the path"
    folder = tmp_path_factory.mktemp("route")
    for per_lane in (1, 4, 8):
        command = [compiler, "-std=c++20", "-O1", "-pthread", "-Wno-unknown-pragmas"]
        command += [f"-DPERSEUS_CHECKED_PER_LANE={per_lane}", f"-I{_HERE / 'warp_on_host'}", f"-I{include_dir()}"]
        subprocess.run([*command, str(_HERE / "route_check.cpp"), "-o", str(folder / str(per_lane))], check=True)
    return {per_lane: folder / str(per_lane) for per_lane in (1, 4, 8)}


def _route(program: Path, logits_TE: Tensor, bias_E: Tensor | None, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    params = fused_router.route_params(spec, num_tokens, num_experts, logits_TE.dtype, None)
    text = bytes(params) + (bias_E is not None).to_bytes(4, "little")
    text += b"" if bias_E is None else bias_E.numpy().tobytes()
    text += logits_TE.contiguous().view(torch.uint8).numpy().tobytes()
    output = subprocess.run([program], input=text, capture_output=True, check=True, timeout=60).stdout
    values = np.frombuffer(output, dtype=np.int32).reshape(2, num_tokens, spec.top_k)
    ids, weights = torch.from_numpy(values.copy())
    return weights.view(torch.float32), ids


def _spec(routing_name: str, top_k: int = 4, **numbers: object) -> RoutingSpec:
    dtypes = {"router_dtype": torch.float32, "score_dtype": torch.float32, "weights_dtype": torch.float32}
    return RoutingSpec(**{"routing": routing_name, "top_k": top_k, **dtypes, **numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_experts", "spec"),
    [
        pytest.param(128, _spec("softmax_topk", 8, renormalize=True), id="softmax"),
        pytest.param(60, _spec("softmax_topk", weights_dtype=torch.bfloat16), id="softmax-odd"),
        pytest.param(32, _spec("topk_softmax"), id="topk-softmax"),
        pytest.param(
            200, _spec("sigmoid_topk", 6, renormalize=True, renormalize_eps=1e-20, routing_scale=2.5), id="sigmoid"
        ),
        pytest.param(64, _spec("sigmoid_topk", renormalize=True, num_groups=8, topk_groups=3), id="groups"),
        pytest.param(4, _spec("softmax_topk"), id="all-chosen"),
    ],
)
def test_matches_torch(programs: dict[int, Path], num_experts: int, spec: RoutingSpec) -> None:
    random = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(5, num_experts, generator=random)
    bias = torch.randn(num_experts, generator=random) if spec.routing == "sigmoid_topk" else None
    numbers = spec.as_kwargs()
    del numbers["router_dtype"]
    weights, ids = routing.choose(logits, bias, **numbers)
    program = next(path for per_lane, path in programs.items() if 32 * per_lane >= num_experts)
    own_weights, own_ids = _route(program, logits, bias, spec)
    order, own_order = ids.argsort(-1), own_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), own_ids.gather(1, own_order).long())
    rounding = 1e-2 if spec.weights_dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(
        own_weights.gather(1, own_order), weights.gather(1, order).float(), rtol=rounding, atol=1e-7
    )


@pytest.mark.parametrize("routing_name", ["softmax_topk", "topk_softmax", "sigmoid_topk"])
def test_ties_and_nan(programs: dict[int, Path], routing_name: str) -> None:
    logits = torch.zeros(3, 100, dtype=torch.bfloat16)
    logits[1] = float("nan")
    logits[2, 7], logits[2, 50] = float("nan"), float("-inf")
    weights, ids = _route(programs[4], logits, None, _spec(routing_name, 5))
    assert ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [7, 0, 1, 2, 3]]
    assert weights[0].isfinite().all() and weights[1].isnan().all() and weights[2, 0].isnan()
