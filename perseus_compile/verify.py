"""Does a rewrite keep the numbers? Runs the region and the op that replaces it on the same random inputs."""

from __future__ import annotations

import contextlib

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from .errors import VerificationError
from .facts import LIST_AXES, MoEMatch, MoEPlan
from .passes.rewrite_moe import entries, op_call, with_choices

# Largest relative L2 error between the region and the op. Both round differently inside; a wrong rewrite is off by
# the size of the result.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def check_rewrite(gm: GraphModule, match: MoEMatch, plan: MoEPlan) -> None:
    """Compares the forward values of ``match`` with those of the op of ``plan``.

    Raises:
        VerificationError: they differ by more than rounding explains.
    """
    target, args, kwargs = op_call(match, plan)
    region, inputs = region_module(gm, match, fused_router=plan.op == "moe")
    # A parameter that the op gets and the region never reads, or the reverse, is a difference too.
    generator = torch.Generator().manual_seed(0)
    needed = dict.fromkeys(inputs)
    torch.fx.node.map_arg(args, needed.setdefault)
    values = {node: _random_input(match, node, generator) for node in needed}
    if match.router is not None:
        values[match.router.x_TD] = values[match.x_TD]
    with torch.no_grad(), _no_tracing():
        expected = region(*(values[node] for node in inputs))
        call = list(torch.fx.node.map_arg(args, values.__getitem__))
        if plan.op != "moe":
            _, ids, weights = call[:3]
            call[1:3] = with_choices(ids, weights, values[match.x_TD].dtype)
        if plan.op == "experts_list":
            call[3:] = [entries(tensors, axes) for tensors, axes in zip(call[3:], LIST_AXES, strict=True)]
        actual = target(*call, **kwargs)
    error = _relative_error(actual, expected)
    limit = _TOLERANCE[expected.dtype]
    if not error <= limit:
        raise VerificationError(
            f"{match.layer}: perseus::{plan.op} must give the numbers of the code that it replaces (relative error up "
            f"to {limit:g} in {expected.dtype}), got {error:.3g}; this is a fault of perseus_compile: please report "
            "it, and leave this model to another backend"
        )


def region_module(gm: GraphModule, match: MoEMatch, *, fused_router: bool) -> tuple[GraphModule, list[Node]]:
    """The matched region as a module of its own, and the nodes whose values are its inputs, in order.

    Sizes and other scalars that it reads become today's numbers.
    """
    region = match.region_with_router if fused_router else match.region
    nodes = [node for node in gm.graph.nodes if node in region]
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in region)
    inputs = [node for node in read if isinstance(node.meta.get("example_value"), torch.Tensor)]
    graph = Graph()
    copies: dict[Node, object] = {node: graph.placeholder(node.name) for node in inputs}
    copies |= {node: _number(node.meta.get("example_value")) for node in read if node not in copies}
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
    graph.output(copies[match.written[0] if match.written else match.output])
    return GraphModule(torch.nn.Module(), graph), inputs


def _random_input(match: MoEMatch, node: Node, generator: torch.Generator) -> torch.Tensor:
    fake = node.meta["example_value"]
    shape = [int(_number(size)) for size in fake.shape]
    with _no_tracing():
        if node is match.ids_TK and len(shape) == 1:
            # In order, as grouped GEMMs need them.
            ids_R = torch.randint(match.spec.num_experts, shape, generator=generator)
            return ids_R.sort()[0].to(fake.device, fake.dtype)
        if node is match.ids_TK:
            order = torch.rand(shape[0], match.spec.num_experts, generator=generator).argsort(dim=1)
            return order[:, : shape[1]].to(fake.device, fake.dtype)
        value = torch.randn(shape, generator=generator)
        if node is match.weights_TK:
            return value.abs().to(fake.device, fake.dtype)
        return (value * shape[-1] ** -0.5 if len(shape) > 2 else value).to(fake.device, fake.dtype)


def _number(value: object) -> int | float | bool:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint
    assert isinstance(value, (int, float, bool)), f"a matched region reads tensors and numbers, got {value!r}"
    return value


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    with _no_tracing():
        difference = (actual.double() - expected.double()).norm()
        return float(difference / expected.double().norm().clamp_min(1e-30))


def _no_tracing() -> contextlib.AbstractContextManager[None]:
    # A backend runs under Dynamo's fake mode; these are real computations.
    return _disable_current_modes()
