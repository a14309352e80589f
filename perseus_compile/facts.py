"""Which records flow between the stages? Frozen and printable; a leaf module that imports nothing of the package.

capture -> match -> ``MoEMatch`` | ``Refusal`` -> plan -> ``MoEPlan`` -> rewrite -> (inner compiler) -> lower ->
``KernelSpec`` -> launch.

Axes in tensor names: T tokens, K choices per token, E experts, D model width, F expert width, N output features of
a linear map, R routed rows (T*K).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node

Routing = Literal["softmax_topk", "topk_softmax", "sigmoid_topk"]
WeightLayout = Literal["out_in", "in_out"]
GateLayout = Literal["concatenated", "interleaved", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "clamped_silu", "softcapped_silu"]
WeightOn = Literal["output", "input"]
Tokens = Literal["split", "replicated"]
Stage = Literal["capture", "match", "plan"]
# Weights or biases of all experts: one stacked tensor, or a tensor for each expert.
Weights: TypeAlias = "Node | tuple[Node, ...]"
LIST_AXES = (2, 1, 2, 1)  # of one expert's gate_up, gate_up_bias, down and down_bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """How scores become (weights, expert ids): the numbers of ``perseus::moe`` that belong to the router.

    Defaults are those of the op, which has some for the dtypes, too (``default_dtypes``).

    ``softmax_topk``: softmax over all experts, then top-k. ``topk_softmax``: top-k of the logits, then softmax over the
    chosen. ``sigmoid_topk``: sigmoid; the choice is made on score + correction bias, inside the best groups; the weight
    is the score without the bias.
    """

    top_k: int
    router_dtype: torch.dtype  # x and router weight are cast to it before the logits are computed
    score_dtype: torch.dtype  # softmax or sigmoid is computed and returned in it
    weights_dtype: torch.dtype  # the weights are rounded to it once, after renormalising and before scaling
    routing: Routing = "softmax_topk"
    renormalize: bool = False  # divide the chosen scores by their sum (+ renormalize_eps)
    renormalize_eps: float = 0.0
    routing_scale: float = 1.0  # multiplies the weights after renormalising
    num_groups: int = 1  # experts form this many equal groups
    topk_groups: int = 1  # only the best so many groups (by the sum of their two best scores) may be chosen from

    def as_kwargs(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """What the experts compute: the numbers of ``perseus::experts`` that are not tensors. Defaults are the op's."""

    num_experts: int  # E over all ranks; ids outside [expert_offset, expert_offset + local experts) are skipped
    # out_in: gate_up [E, 2F, D], down [E, D, F]; in_out: [E, D, 2F] and [E, F, D]
    weight_layout: WeightLayout = "out_in"
    # concatenated: [gate; up] along 2F; interleaved: gate0, up0, gate1, ...; none: no gate, F instead of 2F
    gate_layout: GateLayout = "concatenated"
    activation: Activation = "silu"
    activation_params: tuple[float, ...] = ()  # lower.ACTIVATION_PARAMS names them
    weight_on: WeightOn = "output"  # the routing weight multiplies an expert's output, or its input row
    expert_offset: int = 0  # id of the first expert whose weights are passed

    def as_kwargs(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "activation_params": list(self.activation_params)}

    @classmethod
    def from_kwargs(cls, numbers: Mapping[str, Any]) -> ExpertsSpec:
        """The inverse of ``as_kwargs``; numbers that the dispatcher left out have their defaults."""
        return cls(**{**numbers, "activation_params": tuple(numbers.get("activation_params", ()))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """How the ranks of a group share the experts: what ``perseus::experts_parallel`` has beyond ``ExpertsSpec``.

    Defaults are the op's.
    """

    group_name: str
    tokens: Tokens = "split"  # split: each rank has tokens of its own; replicated: all ranks hold the same tokens
    max_tokens_per_rank: int = 0  # more on any rank is an error on all; 0: no limit

    def as_kwargs(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def describe(self, num_experts: int, num_local: int) -> str:
        """Who shares the experts of a layer, as ``explain`` says it."""
        num_ranks = num_experts // num_local
        return f"{num_experts} experts over {num_ranks} ranks of group {self.group_name!r}, {self.tokens} tokens"


def default_dtypes(x_dtype: torch.dtype) -> dict[str, Any]:
    """Those dtypes of a router that ``perseus::moe`` takes where they are None."""
    return {"router_dtype": x_dtype, "score_dtype": torch.float32, "weights_dtype": torch.float32}


def op_arguments(spec: RoutingSpec | ExpertsSpec, x_dtype: torch.dtype) -> dict[str, Any]:
    """The keyword arguments by which a perseus op learns ``spec``; those that have their default are left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    if isinstance(spec, RoutingSpec):
        defaults |= default_dtypes(x_dtype)
    return {name: value for name, value in spec.as_kwargs().items() if getattr(spec, name) != defaults[name]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One question that a stage asked about a layer, and the answer.

    Attributes:
        stage: the stage that asked.
        name: a rule of recognition, or what must hold around the layer; "-" where no rule reads the node.
        node: the operator that it was asked about; empty where it is about the whole layer.
        passed: False where the answer is the sentence of a refusal.
        finding: what was found, or that sentence.
    """

    stage: Stage
    name: str
    node: str = ""
    passed: bool
    finding: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterMatch:
    """The router of a MoE layer, as nodes of Dynamo's graph. ``x_TD`` holds the same numbers as the experts' x."""

    x_TD: Node
    weight_ED: Node
    bias_E: Node | None
    correction_bias_E: Node | None
    spec: RoutingSpec
    region: frozenset[Node]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEMatch:
    """One MoE layer found in a graph, as nodes of Dynamo's graph.

    ``router`` is None where the experts are matched alone; ``router_reason`` then says why. ``weights_TK`` is None
    where the match ends before the routing weights, or has none: each is then 1. Ids of one choice per token may be
    [T], and routing weights too. Tuples of weights are the lists of ``perseus::experts_list``, where a stack stands for
    its entries. ``output`` becomes the perseus node; where the layer writes its sum in place, ``written`` are the other
    nodes that are the written tensor, the first of them before any write. ``symbols`` are numbers that Dynamo made
    inputs of the graph and that the rewrite fixes; each takes a guard. ``checks`` are what was asked about the layer,
    in order.
    """

    layer: str  # dotted module path for messages only; never used to decide
    spelling: str
    x_TD: Node
    ids_TK: Node
    weights_TK: Node | None
    gate_up: Weights
    gate_up_bias: Weights | None
    down: Weights
    down_bias: Weights | None
    spec: ExpertsSpec
    output: Node
    region: frozenset[Node]
    router: RouterMatch | None
    router_reason: str | None
    symbols: tuple[torch.SymFloat | torch.SymInt, ...] = ()
    written: tuple[Node, ...] = ()
    parallel: ParallelSpec | None = None  # set: this rank's experts are some of those of a group
    negative_ids_wrap: bool = False  # ids index the weights directly and may be negative: -1 is the last expert
    checks: tuple[Check, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def experts(self) -> tuple[Weights, Weights | None, Weights, Weights | None]:
        """gate_up, gate_up_bias, down and down_bias."""
        return self.gate_up, self.gate_up_bias, self.down, self.down_bias

    @property
    def region_with_router(self) -> frozenset[Node]:
        """All nodes that the perseus node may make needless."""
        return self.region | (self.router.region if self.router else frozenset())


def nodes_of(weights: Weights | None) -> tuple[Node, ...]:
    """The nodes of weights: none, one or many."""
    return () if weights is None else (weights,) if isinstance(weights, Node) else weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A place that looked like a MoE layer and keeps its own code, and the sentence that says why."""

    layer: str
    stage: Stage
    reason: str
    node: str  # name of the node in Dynamo's graph at which the stage stopped
    checks: tuple[Check, ...] = dataclasses.field(default=(), repr=False, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEPlan:
    """What the rewriter does with a match: which op, and why."""

    op: Literal["experts", "experts_list", "experts_parallel", "moe"]
    why: str  # one clause for explain()
    checks: tuple[Check, ...] = dataclasses.field(default=(), repr=False, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """How one ``perseus::experts`` call runs: everything that is known without looking at the token count."""

    device: Literal["cpu", "cuda"]
    dtype: torch.dtype  # of x, the expert weights and biases, and of every GEMM
    combine_dtype: torch.dtype  # the weighted sum over the chosen experts is made in it
    num_local_experts: int  # experts whose weights are passed
    model_width: int  # D
    expert_width: int  # F
    few_rows: int  # an expert with at most so many rows runs in the few-row loops, others as a GEMM; 0: always a GEMM
    experts: ExpertsSpec
