"""Is the router of perseus::moe the model's own, bit for bit, and is the rest perseus::experts?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from op_cases import DIFFERENTIABLE, Case, assert_near, assert_same_bits, make_case, one_thread
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from perseus_compile import reference
from perseus_compile.routing import route

NUM_TOKENS, NUM_EXPERTS, TOP_K, WIDTH = 64, 8, 3, 16
DTYPES = (torch.float32, torch.bfloat16)


def numbers(dtype: torch.dtype, routing: str, **changes: Any) -> dict[str, Any]:
    """The router's numbers of perseus::moe for a model in ``dtype``."""
    plain = {
        "routing": routing,
        "top_k": TOP_K,
        "renormalize": False,
        "renormalize_eps": 0.0,
        "routing_scale": 1.0,
        "num_groups": 1,
        "topk_groups": 1,
        "router_dtype": dtype,
        "score_dtype": torch.float32,
        "weights_dtype": dtype,
    }
    return {**plain, **changes}


def softmax_numbers(dtype: torch.dtype, config: dict[str, Any]) -> dict[str, Any]:
    return numbers(dtype, "softmax_topk", renormalize=config["norm_topk_prob"])


def mixtral_numbers(dtype: torch.dtype, config: dict[str, Any]) -> dict[str, Any]:
    return numbers(dtype, "softmax_topk", renormalize=True, weights_dtype=torch.float32)


def sigmoid_numbers(dtype: torch.dtype, config: dict[str, Any]) -> dict[str, Any]:
    return numbers(
        dtype,
        "sigmoid_topk",
        renormalize=config["norm_topk_prob"],
        renormalize_eps=1e-20 if config["norm_topk_prob"] else 0.0,
        routing_scale=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        topk_groups=config["topk_group"],
        router_dtype=torch.float32,
        weights_dtype=torch.float32,
    )


def gpt_oss_numbers(dtype: torch.dtype, config: dict[str, Any]) -> dict[str, Any]:
    return numbers(dtype, "topk_softmax", score_dtype=dtype)


NORM, NO_NORM = {"norm_topk_prob": True}, {"norm_topk_prob": False}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
NO_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
# Model, class of its router, what the class reads of a config beside sizes, and our numbers for it.
ROUTERS: dict[str, tuple[str, str, dict[str, Any], Callable[..., dict[str, Any]]]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {}, mixtral_numbers),
    "qwen2": ("qwen2_moe", "Qwen2MoeTopKRouter", NO_NORM, softmax_numbers),
    "qwen2, normalised": ("qwen2_moe", "Qwen2MoeTopKRouter", NORM, softmax_numbers),
    "qwen3": ("qwen3_moe", "Qwen3MoeTopKRouter", NORM, softmax_numbers),
    "qwen3, not normalised": ("qwen3_moe", "Qwen3MoeTopKRouter", NO_NORM, softmax_numbers),
    "olmoe": ("olmoe", "OlmoeTopKRouter", NO_NORM, softmax_numbers),
    "olmoe, normalised": ("olmoe", "OlmoeTopKRouter", NORM, softmax_numbers),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter", {**NORM, **GROUPS}, sigmoid_numbers),
    "deepseek_v3, one group": ("deepseek_v3", "DeepseekV3TopkRouter", {**NO_NORM, **NO_GROUPS}, sigmoid_numbers),
    "glm4_moe": ("glm4_moe", "Glm4MoeTopkRouter", {**NORM, **NO_GROUPS}, sigmoid_numbers),
    "glm4_moe, groups": ("glm4_moe", "Glm4MoeTopkRouter", {**NO_NORM, **GROUPS}, sigmoid_numbers),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", {}, gpt_oss_numbers),
}


class Layer:
    """A Hugging Face router with random weights, its tokens, experts, and the same as a call of perseus::moe."""

    def __init__(self, name: str, dtype: torch.dtype, *, ties: bool = False) -> None:
        model, router_class, config, numbers_of = ROUTERS[name]
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        sizes = {
            "hidden_size": WIDTH,
            "num_experts_per_tok": TOP_K,
            "num_experts": NUM_EXPERTS,
            "num_local_experts": NUM_EXPERTS,
            "n_routed_experts": NUM_EXPERTS,
        }
        self.router: nn.Module = getattr(module, router_class)(SimpleNamespace(**sizes, **config))
        self.router.to(dtype)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for tensor in (*self.router.parameters(), *self.router.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
                if ties:  # the experts of each half have equal scores
                    tensor[NUM_EXPERTS // 2 :] = tensor[: NUM_EXPERTS // 2]
        self.experts = make_case(
            num_tokens=NUM_TOKENS, num_choices=TOP_K, num_local=NUM_EXPERTS, width=WIDTH, dtype=dtype, seed=3
        )
        self.x = self.experts["x"]
        self.router_numbers = numbers_of(dtype, config)

    @property
    def router_tensors(self) -> list[Tensor | None]:
        """router_weight, router_bias, correction_bias."""
        return [getattr(self.router, name, None) for name in ("weight", "bias", "e_score_correction_bias")]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.x, *self.router_tensors, *self.experts.tensors[3:]]

    @property
    def numbers(self) -> dict[str, Any]:
        return {**self.router_numbers, **self.experts.numbers}

    def moe(self) -> Tensor:
        return torch.ops.perseus.moe(*self.tensors, **self.numbers)

    def choose(self) -> tuple[Tensor, Tensor]:
        """The weights and ids of the Hugging Face router."""
        _, weights_TK, ids_TK = self.router(self.x)
        return weights_TK, ids_TK

    def choice_and_experts(self) -> Case:
        """The Hugging Face router's choice, as a call of perseus::experts."""
        weights_TK, ids_TK = self.choose()
        return self.experts.having(ids=ids_TK, weights=weights_TK)

    def frozen(self) -> Layer:
        self.router.requires_grad_(False)
        return self

    def leaves(self) -> dict[str, Tensor]:
        """All tensors that the layer is differentiated by, requiring gradients."""
        names = [name for name in DIFFERENTIABLE if name != "weights"]
        self.experts = self.experts.leaves(names)
        self.x = self.experts["x"]
        return {**{name: self.experts[name] for name in names}, **dict(self.router.named_parameters(prefix="router"))}


@pytest.mark.parametrize("ties", (False, True), ids=("distinct", "ties"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_router_has_the_models_bits(name: str, dtype: torch.dtype, ties: bool) -> None:
    layer = Layer(name, dtype, ties=ties).frozen()
    weights_TK, ids_TK = layer.choose()
    have_weights, have_ids = route(layer.x, *layer.router_tensors, **layer.router_numbers)
    assert_same_bits(have_ids, ids_TK)
    assert_same_bits(have_weights, weights_TK)
    assert len(ids_TK.unique()) > TOP_K  # not one and the same choice for every token


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_moe_is_the_models_router_and_the_experts(name: str, dtype: torch.dtype) -> None:
    layer = Layer(name, dtype).frozen()
    have = layer.moe()
    assert_same_bits(have, layer.choice_and_experts().run())
    assert_near(have, layer.choice_and_experts().exact().reference())


@pytest.mark.parametrize("routing", ("softmax_topk", "topk_softmax", "sigmoid_topk"))
@pytest.mark.parametrize("renormalize_eps", (0.0, 0.25))
def test_renormalised_and_scaled(routing: str, renormalize_eps: float) -> None:
    """Against the formula: weights sum to scale * sum / (sum + eps)."""
    layer = Layer("mixtral", torch.float32).frozen()
    plain = numbers(torch.float32, routing)
    weights_TK, ids_TK = route(layer.x, *layer.router_tensors, **plain)
    changes = {"renormalize": True, "renormalize_eps": renormalize_eps, "routing_scale": 1.5}
    have_weights, have_ids = route(layer.x, *layer.router_tensors, **{**plain, **changes})
    assert_same_bits(have_ids, ids_TK)
    assert_near(have_weights, 1.5 * weights_TK / (weights_TK.sum(-1, keepdim=True) + renormalize_eps))
    layer.router_numbers = {**plain, **changes}
    assert_same_bits(layer.moe(), layer.experts.having(ids=have_ids, weights=have_weights).run())


def test_groups_limit_the_choice() -> None:
    """Of 4 groups of 2, the 2 with the largest sums; the weights are the scores without the correction bias."""
    bias = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.4, 0.4, 0.0, 0.6])
    chosen = numbers(torch.float32, "sigmoid_topk", num_groups=4, topk_groups=2)
    weights_TK, ids_TK = route(torch.zeros(5, WIDTH), torch.zeros(NUM_EXPERTS, WIDTH), None, bias, **chosen)
    # Group sums 0, 0.5, 0.8 and 0.6: experts 4 to 7 are left, of which 6 is the worst.
    assert ids_TK.sort(dim=-1)[0].tolist() == [[4, 5, 7]] * 5
    assert weights_TK.tolist() == [[0.5] * TOP_K] * 5


@pytest.mark.parametrize("num_tokens", (0, 1))
@pytest.mark.parametrize("name", ("qwen3", "deepseek_v3", "gpt_oss"))
def test_no_token_and_one_token(name: str, num_tokens: int) -> None:
    layer = Layer(name, torch.float32).frozen()
    layer.x = layer.x[:num_tokens]
    layer.experts = layer.experts.having(x=layer.x)
    have = layer.moe()
    assert have.shape == (num_tokens, WIDTH)
    assert_same_bits(have, layer.choice_and_experts().run())


def test_poison_stays_in_its_token() -> None:
    layer = Layer("qwen3", torch.float32).frozen()
    want = layer.moe()
    layer.x = layer.x.clone()
    layer.x[5] = torch.nan
    have = layer.moe()
    others = [token for token in range(NUM_TOKENS) if token != 5]
    assert_same_bits(have[others], want[others])
    assert bool(have[5].isnan().all())


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_are_those_of_the_models_router(name: str) -> None:
    """Of x, router and experts; the other side is the Hugging Face router before the reference of the experts."""
    layer = Layer(name, torch.float32)
    leaves = layer.leaves()
    out = layer.moe()
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    want = torch.autograd.grad(layer.choice_and_experts().reference(), list(leaves.values()), grad)
    have = torch.autograd.grad(out, list(leaves.values()), grad)
    for one, other, leaf in zip(have, want, leaves, strict=True):
        assert one.dtype == torch.float32 and bool(one.any()), leaf
        assert_near(one, other)


@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("routing", ("softmax_topk", "topk_softmax", "sigmoid_topk"))
def test_gradcheck(routing: str, weight_on: str) -> None:
    case = make_case(num_tokens=3, num_local=3, width=2, inner=2, dtype=torch.float64, weight_on=weight_on)
    generator = torch.Generator().manual_seed(2)
    router = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (3,), (3,))]
    if routing != "sigmoid_topk":
        router[2] = None
    renormalize = routing != "topk_softmax"
    router_numbers = numbers(torch.float64, routing, top_k=2, renormalize=renormalize, score_dtype=torch.float64)
    tensors = [case["x"], *router, *case.tensors[3:]]
    for tensor in tensors:
        if tensor is not None and tensor is not router[2]:  # the correction bias only chooses
            tensor.requires_grad_(True)

    def call(*tensors: Tensor | None) -> Tensor:
        return torch.ops.perseus.moe(*tensors, **router_numbers, **case.numbers)

    with one_thread():
        assert torch.autograd.gradcheck(call, tensors)
    assert_near(call(*tensors), reference.moe(*tensors, **router_numbers, **case.numbers))


def perseus_nodes(graph: torch.fx.Graph) -> list[str]:
    return [node.target.__name__ for node in graph.nodes if getattr(node.target, "namespace", "") == "perseus"]


def aten_nodes(graph: torch.fx.Graph) -> list[str]:
    return [node.target.__name__ for node in graph.nodes if getattr(node.target, "namespace", "") == "aten"]


@pytest.mark.parametrize("tracing_mode", ("real", "fake", "symbolic"))
def test_one_node_is_traced_without_gradients(tracing_mode: str) -> None:
    layer = Layer("deepseek_v3", torch.float32).frozen()
    gm = make_fx(lambda *tensors: torch.ops.perseus.moe(*tensors, **layer.numbers), tracing_mode=tracing_mode)(
        *layer.tensors
    )
    assert perseus_nodes(gm.graph) == ["moe.default"]
    assert set(aten_nodes(gm.graph)) <= {"sym_size.int"}
    assert_same_bits(gm(*layer.tensors), layer.moe())


@pytest.mark.parametrize("gradients", ("enabled", "no_grad", "inference_mode"))
def test_parameters_alone_do_not_split_the_node(gradients: str) -> None:
    """What counts is whether a gradient may be asked for, not whether a parameter could have one."""
    layer = Layer("qwen3", torch.float32)
    layer.leaves()

    def call(*tensors: Tensor) -> Tensor:
        return torch.ops.perseus.moe(*tensors, **layer.numbers)

    mode = {"enabled": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[gradients]
    with mode():
        gm = make_fx(call)(*layer.tensors)
        out = layer.moe()
    assert perseus_nodes(gm.graph) == (["experts.default"] if gradients == "enabled" else ["moe.default"])
    assert out.requires_grad is (gradients == "enabled")


@pytest.mark.parametrize("leaf", ("x", "gate_up", "router.weight"))
def test_aot_traces_the_experts_with_gradients(leaf: str) -> None:
    layer = Layer("qwen3", torch.float32)
    for name, tensor in layer.leaves().items():
        tensor.requires_grad_(name == leaf)
    graphs: list[torch.fx.Graph] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    compiled = aot_function(lambda *tensors: torch.ops.perseus.moe(*tensors, **layer.numbers), keep, keep)
    out = compiled(*layer.tensors)
    assert_same_bits(out.detach(), layer.moe().detach())
    out.sum().backward()
    forward, backward = graphs
    assert perseus_nodes(forward) == ["experts.default"]
    assert "topk.default" in aten_nodes(forward)
    assert perseus_nodes(backward) == ["experts_backward.default"]
