"""Does a rewrite keep the numbers? Runs the region and the op that replaces it on the same random inputs."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from .errors import VerificationError
from .facts import MoEMatch, MoEPlan
from .passes.rewrite_moe import op_call

# Largest relative L2 error between the region and the op. Both round differently inside; a wrong rewrite is off by
# the size of the result.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def check_rewrite(gm: GraphModule, match: MoEMatch, plan: MoEPlan) -> None:
    """Compares the forward values of ``match`` with those of the op of ``plan``.

    Raises:
        VerificationError: they differ by more than rounding explains.
    """
    target, args, kwargs = op_call(match, plan)
    inputs = [arg for arg in dict.fromkeys(args) if arg is not None]
    region = region_module(gm, match, inputs, fused_router=plan.op == "moe")
    values = dict(zip(inputs, _random_inputs(match, inputs), strict=True))
    with torch.no_grad(), torch._dynamo.utils.preserve_rng_state(), _no_tracing():
        expected = region(*values.values())
        actual = target(*(None if arg is None else values[arg] for arg in args), **kwargs)
    error = _relative_error(actual, expected)
    limit = _TOLERANCE[expected.dtype]
    if not error <= limit:
        raise VerificationError(
            f"{match.layer}: perseus::{plan.op} must give the numbers of the code that it replaces (relative error up "
            f"to {limit:g} in {expected.dtype}), got {error:.3g}; this is a fault of perseus_compile: please report "
            "it, and leave this model to another backend"
        )


def region_module(gm: GraphModule, match: MoEMatch, inputs: list[Node], *, fused_router: bool) -> GraphModule:
    """The matched region as a module of its own; sizes and other scalars become today's numbers."""
    region = match.region | (match.router.region if fused_router and match.router else frozenset())
    graph = Graph()
    copies: dict[Node, object] = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    if fused_router and match.router:
        copies[match.router.x_TD] = copies[match.x_TD]

    def argument(node: Node) -> object:
        return copies[node] if node in copies else _number(node)

    for node in gm.graph.nodes:
        if node in region and node not in copies and node.op in ("call_function", "call_method"):
            copies[node] = graph.create_node(
                node.op,
                node.target,
                torch.fx.node.map_arg(node.args, argument),
                torch.fx.node.map_arg(node.kwargs, argument),
            )
    graph.output(copies[match.output])
    return GraphModule(torch.nn.Module(), graph)


def _number(node: Node) -> object:
    value = node.meta.get("example_value")
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint
    assert isinstance(value, (int, float, bool)), f"{node.name} is read by the region and is no input of it"
    return value


def _random_inputs(match: MoEMatch, inputs: list[Node]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [_random_input(match, node, generator) for node in inputs]


def _random_input(match: MoEMatch, node: Node, generator: torch.Generator) -> torch.Tensor:
    fake = node.meta["example_value"]
    shape = [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in fake.shape]
    with _no_tracing():
        if node is match.ids_TK:
            order = torch.rand(shape[0], match.spec.num_experts, generator=generator).argsort(dim=1)
            return order[:, : shape[1]].to(fake.dtype)
        value = torch.randn(shape, generator=generator)
        if node is match.weights_TK:
            return value.abs().to(fake.dtype)
        return (value * shape[-1] ** -0.5 if len(shape) > 2 else value).to(fake.dtype)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    with _no_tracing():
        difference = (actual.double() - expected.double()).norm()
        return float(difference / expected.double().norm().clamp_min(1e-30))


def _no_tracing() -> torch.utils._python_dispatch._DisableTorchDispatch:
    # A backend runs under Dynamo's fake mode; these are real computations.
    return torch.utils._python_dispatch._disable_current_modes()
