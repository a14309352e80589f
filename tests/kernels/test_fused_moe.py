"""Does one launch route its own tokens: logits, choices and weights as the torch ops, and the same layer as before?"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from moe_case import TOLERANCE, Case, make_case, reference, relative_error
from sm_holder import hold_sms
from torch import Tensor

import perseus_compile
from perseus_compile import cuda_plan, fused_moe, fused_router, routing
from perseus_compile.errors import PeerTimeout
from perseus_compile.facts import RoutingSpec
from perseus_compile.jit import compiler
from perseus_compile.jit.moe_kernel import LaunchRouter, MoeKernel, Prepared, control_blocks
from perseus_compile.jit.shipped import FORMS
from perseus_compile.jit.spec import TILE_CONFIGS, spec_for

pytestmark = pytest.mark.gpu
TILES = tuple(name for name, tiles in TILE_CONFIGS.items() if tiles.may_route)
CLAIM_WORD = 7  # ControlBlock.router_claim


def _spec(routing_name: str = "softmax_topk", top_k: int = 4, **numbers: object) -> RoutingSpec:
    dtypes = {"router_dtype": torch.bfloat16, "score_dtype": torch.float32, "weights_dtype": torch.float32}
    return RoutingSpec(**{"routing": routing_name, "top_k": top_k, **dtypes, **numbers})  # type: ignore[arg-type]


SPECS = {
    "softmax": _spec(renormalize=True),
    "softmax-bf16": _spec(weights_dtype=torch.bfloat16),
    "gpt-oss": _spec("topk_softmax", score_dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    "sigmoid": _spec("sigmoid_topk", renormalize=True, renormalize_eps=1e-20, routing_scale=2.5),
    "groups": _spec("sigmoid_topk", renormalize=True, num_groups=4, topk_groups=2),
}


@functools.cache
def _kernel(tiles: str, weight_layout: str, gate_layout: str, activation: str) -> MoeKernel:
    torch.backends.cuda.matmul.allow_tf32 = False
    form = {"weight_layout": weight_layout, "gate_layout": gate_layout, "activation": activation}
    return MoeKernel(compiler.build(spec_for(tiles, **form, routes=True)), 0)


@dataclasses.dataclass
class Layer:
    """One layer: a case whose ids and weights only say their shape, and a router."""

    case: Case
    router: fused_moe.Router

    @staticmethod
    def random(
        num_tokens: int,
        num_experts: int,
        model_width: int,
        spec: RoutingSpec,
        *,
        width: int = 64,
        bias: bool = False,
        **of_experts: object,
    ) -> Layer:
        shape = (model_width, width, num_experts, spec.top_k, num_tokens)
        case = make_case(*shape, id_dtype=torch.int32, **of_experts)  # type: ignore[arg-type]
        random = torch.Generator(device="cuda").manual_seed(num_experts)

        def normal(*shape: int) -> Tensor:
            return torch.empty(*shape, device="cuda").normal_(generator=random)

        correction = normal(num_experts).mul(0.1) if spec.routing == "sigmoid_topk" else None
        weight = normal(num_experts, model_width).mul(model_width**-0.5).bfloat16()
        return Layer(case, fused_moe.Router(weight, normal(num_experts).bfloat16() if bias else None, correction, spec))

    def logits(self) -> Tensor:
        """In float32, not rounded."""
        bias = self.router.bias_E
        logits = self.case.x.float() @ self.router.weight_ED.float().mT
        return logits if bias is None else logits + bias.float()

    def prepared(self, tiles: str, **options: object) -> Prepared:
        num_tokens, num_experts = self.case.x.shape[0], self.router.weight_ED.shape[0]
        params = fused_router.route_params(
            self.router.spec, num_tokens, num_experts, torch.bfloat16, self.router.correction_bias_E
        )
        router = LaunchRouter(self.router.weight_ED, self.router.bias_E, params)
        spec = self.case.spec
        kernel = _kernel(tiles, spec.weight_layout, spec.gate_layout, spec.activation)
        return kernel.prepare(*self.case.args, spec, router=router, **options)  # type: ignore[arg-type]


@dataclasses.dataclass
class Result:
    out: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor

    def equals(self, other: Result) -> bool:
        pairs = ((getattr(one, field.name) for one in (self, other)) for field in dataclasses.fields(self))
        return all(torch.equal(one, two) for one, two in pairs)


def _tiles(layer: Layer) -> str:
    """What the planner takes, but for many rows, where it gives the router launches of its own."""
    case = layer.case
    ids_TK = torch.empty(case.x.shape[0], layer.router.spec.top_k)
    plan = cuda_plan.plan_of_call(case.x, ids_TK, case.gate_up, case.gate_up_bias, case.down, case.spec)
    return plan.tiles if plan.tiles in TILES else TILES[-1]


def _run(layer: Layer, tiles: str | None = None, **options: object) -> Result:
    """One launch on a workspace full of NaN."""
    tiles = tiles or _tiles(layer)
    prepared = layer.prepared(tiles, **options)
    layout = prepared.layout
    workspace = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    out = prepared.run(layer.case.x, None, None, workspace)
    num_tokens, num_experts = layer.case.x.shape[0], layer.router.weight_ED.shape[0]

    def array(start: int, dtype: torch.dtype, columns: int) -> Tensor:
        count = num_tokens * columns * dtype.itemsize
        return workspace[start : start + count].view(dtype).view(num_tokens, columns)

    top_k = layer.router.spec.top_k
    return Result(
        out,
        array(layout.logits, torch.bfloat16, num_experts),
        array(layout.routed_ids, torch.int32, top_k),
        array(layout.routed_weights, torch.float32, top_k),
    )


def _check_router(layer: Layer, result: Result) -> None:
    exact = layer.logits()
    torch.testing.assert_close(result.logits.float(), exact, rtol=2**-8, atol=1e-4)
    # what follows the logits is the code of the routing kernel, which has its own tests against torch
    routed = fused_router.route_logits(result.logits, layer.router.correction_bias_E, layer.router.spec)
    assert routed is not None
    assert torch.equal(result.weights, routed[0]) and torch.equal(result.ids, routed[1])
    weights, ids = routing.route(layer.case.x, *layer.router[:3], **layer.router.spec.as_kwargs())
    order, own_order = ids.argsort(-1), result.ids.argsort(-1)
    same = (ids.gather(1, order) == result.ids.gather(1, own_order)).all(-1)
    if layer.router.spec.num_groups == 1:
        scores = exact if layer.router.correction_bias_E is None else exact.sigmoid() + layer.router.correction_bias_E
        top = scores.topk(min(layer.router.spec.top_k + 1, scores.shape[1]))[0]
        spread = scores.std()
        decisive = (top[:, -2] - top[:, -1] > 0.05 * spread) | (top.shape[1] == layer.router.spec.top_k)
        assert same[decisive].all()
    if len(same) >= 64:
        assert same.float().mean() > 0.6  # the others are near ties, which BF16 logits decide
    torch.testing.assert_close(
        result.weights.gather(1, own_order)[same], weights.gather(1, order).float()[same], rtol=3e-2, atol=1e-3
    )


def _check_output(layer: Layer, result: Result) -> None:
    chosen = dataclasses.replace(layer.case, ids=result.ids, weights=result.weights)
    assert relative_error(result.out, reference(chosen)) < TOLERANCE


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 64, 129, 1000, 4097])
def test_routings(name: str, num_tokens: int) -> None:
    layer = Layer.random(num_tokens, 64, 256, SPECS[name], bias=num_tokens % 2 == 1)
    result = _run(layer)
    _check_router(layer, result)
    _check_output(layer, result)
    assert result.equals(_run(layer)), "a second run gave other bits"


@pytest.mark.parametrize("num_tokens", [1, 17, 1000])
@pytest.mark.parametrize("model_width", [2048, 2880, 72])
@pytest.mark.parametrize("num_experts", [8, 60, 128, 160, 256, 1024])
def test_widths_and_experts(num_experts: int, model_width: int, num_tokens: int) -> None:
    layer = Layer.random(num_tokens, num_experts, model_width, SPECS["softmax"])
    result = _run(layer)
    _check_router(layer, result)
    _check_output(layer, result)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 33, 1100, 2100])
def test_every_tile_configuration(tiles: str, num_tokens: int) -> None:
    layer = Layer.random(num_tokens, 130, 520, SPECS["sigmoid"], bias=True)
    result = _run(layer, tiles)
    _check_router(layer, result)
    _check_output(layer, result)
    assert result.equals(_run(layer, tiles)), "a second run gave other bits"


def test_most_choices_and_strided_rows() -> None:
    layer = Layer.random(300, 1024, 72, _spec(top_k=32, renormalize=True))
    layer.case.x = torch.randn(300, 304, device="cuda").bfloat16()[:, 16:88]
    wide = torch.randn(1024, 96, device="cuda").bfloat16()
    layer.router = layer.router._replace(weight_ED=wide[:, 8:80])
    result = _run(layer)
    _check_router(layer, result)
    _check_output(layer, result)


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize("form", FORMS[1:], ids="-".join)
def test_other_forms_of_experts(form: tuple[str, str, str], num_tokens: int) -> None:
    words = dict(zip(("weight_layout", "gate_layout", "activation"), form, strict=True))
    layer = Layer.random(num_tokens, 32, 264, SPECS["gpt-oss"], width=72, bias=True, **words)
    biases = [torch.randn(32, width, device="cuda").bfloat16() for width in (144, 264)]
    layer.case = dataclasses.replace(layer.case, gate_up_bias=biases[0], down_bias=biases[1])
    result = _run(layer)
    _check_router(layer, result)
    _check_output(layer, result)


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_experts_of_other_ranks_are_skipped(num_tokens: int) -> None:
    layer = Layer.random(num_tokens, 16, 256, SPECS["softmax"])
    case = layer.case
    spec = dataclasses.replace(case.spec, expert_offset=5)
    layer.case = dataclasses.replace(case, gate_up=case.gate_up[5:12], down=case.down[5:12], spec=spec)
    result = _run(layer)
    assert int(result.ids.max()) > 11 and int(result.ids.min()) < 5
    _check_output(layer, result)


@pytest.mark.parametrize("num_tokens", [6, 333])
@pytest.mark.parametrize("tiles", ["few8", "few64"])
def test_bad_rows_stay_in_their_tokens(tiles: str, num_tokens: int) -> None:
    layer = Layer.random(num_tokens, 16, 512, SPECS["softmax"])
    clean = _run(layer, tiles)
    layer.case.x = layer.case.x.clone()
    layer.case.x[3, 7], layer.case.x[5, 0] = float("nan"), float("inf")
    result = _run(layer, tiles)
    others = [token for token in range(num_tokens) if token not in (3, 5)]
    assert torch.equal(result.out[others], clean.out[others]) and torch.equal(result.ids[others], clean.ids[others])
    assert result.out[3].isnan().all() and not result.out[5].isfinite().any()
    for row in result.ids[[3, 5]].tolist():
        assert len(set(row)) == len(row) and min(row) >= 0 and max(row) < 16


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_replay_with_new_tokens(num_tokens: int) -> None:
    layer = Layer.random(num_tokens, 32, 256, SPECS["softmax"])
    tiles = _tiles(layer)
    prepared = layer.prepared(tiles)
    x = layer.case.x.clone()
    prepared.run(x, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prepared.run(x, None, None)
    for _ in range(4):
        layer.case.x = torch.randn_like(x)
        x.copy_(layer.case.x)
        graph.replay()
        assert torch.equal(out, _run(layer, tiles).out)


@pytest.mark.parametrize("num_tokens", [3, 500])
def test_two_streams_at_once(num_tokens: int) -> None:
    layer = Layer.random(num_tokens, 32, 512, SPECS["groups"])
    expected = _run(layer)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(_run(layer))
    torch.cuda.synchronize()
    assert all(result.equals(expected) for result in results)


@pytest.mark.parametrize("num_tokens", [2, 200, 3000])
@pytest.mark.parametrize("num_held", [1, 120])
def test_runs_while_another_stream_holds_sms(num_tokens: int, num_held: int) -> None:
    layer = Layer.random(num_tokens, 64, 512, SPECS["softmax"])
    expected = _run(layer)
    torch.cuda.synchronize()
    with hold_sms(num_held) as is_held:
        result = _run(layer)
        torch.cuda.current_stream().synchronize()
        assert is_held(), "the other kernel ended first: nothing was tested"
    assert result.equals(expected)


@pytest.mark.parametrize("num_tokens", [1, 100, 3000])
def test_deadline_gives_nan_and_an_error(num_tokens: int) -> None:
    """A product of the router that nobody claims is never done: everybody waits for it."""
    layer = Layer.random(num_tokens, 64, 512, SPECS["softmax"])
    expected = _run(layer)
    torch.cuda.synchronize()
    blocks = control_blocks(0)
    address = blocks.address(torch.cuda.current_stream().cuda_stream)
    row = (address - blocks.words.data_ptr()) // (blocks.words.stride(0) * 4)
    blocks.words[row, CLAIM_WORD] = 1
    result = _run(layer, deadline_ns=20_000_000)
    torch.cuda.synchronize()
    assert result.out.isnan().all()
    with pytest.raises(PeerTimeout, match=r"waiting for (logits|choices) of the router"):
        _run(layer)
    assert _run(layer).equals(expected), "control words were left dirty"


def test_the_op_is_one_launch_and_means_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer.random(48, 32, 256, SPECS["softmax"])
    case, router = layer.case, layer.router
    numbers = {**router.spec.as_kwargs(), **case.spec.as_kwargs()}

    def call(weight_ED: Tensor) -> Tensor:
        tensors = (case.x, weight_ED, None, None, case.gate_up, None, case.down, None)
        out: Tensor = torch.ops.perseus.moe(*tensors, **numbers)
        return out

    other_weight = router.weight_ED.clone()  # at another address: another call site, planned anew

    launches = []
    run = Prepared.run
    monkeypatch.setattr(Prepared, "run", lambda self, *args: launches.append(args[1]) or run(self, *args))
    monkeypatch.setattr(fused_moe, "router_in_launch", lambda *numbers: True)
    whole = call(router.weight_ED)
    monkeypatch.setattr(fused_moe, "router_in_launch", lambda *numbers: False)
    apart = call(other_weight)
    assert launches[0] is None and launches[1] is not None
    error = (whole - apart).float().norm(dim=-1) / apart.float().norm(dim=-1)
    assert float(error.median()) < 1e-2  # single tokens may have a near tie
    torch.cuda.synchronize()
    perseus_compile.check()


def test_nothing_to_do_gives_zeros() -> None:
    layer = Layer.random(4, 8, 256, SPECS["softmax"])
    case = layer.case
    out = fused_moe.run_moe(layer.router, case.x[:0], case.args[3:], case.spec)
    assert out is not None and out.shape == (0, 256)
