"""What does an experts module compute? Reads it from the module's own code, by the matcher that also rewrites graphs.

The module runs once on a few zero tokens; nothing of it is changed, and its name is never looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]
from torch.fx import GraphModule, Node

from perseus_compile.capture import CaptureError, aten_view
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, MoEMatch, nodes_of
from perseus_compile.passes.match_moe import find_moe_layers

_TOKENS, _CHOICES = 4, 2  # of the trial run


class ExpertsReading(NamedTuple):
    """What an experts module computes, and the names of its parameters in the order of the op; None: no such bias."""

    spec: ExpertsSpec
    parameters: tuple[str | None, str | None, str | None, str | None]


def read_experts(experts: nn.Module, num_experts: int) -> ExpertsReading:
    """What ``experts(tokens, ids, weights)`` computes.

    Raises:
        UnsupportedMoE: it is not, or not only, what ``perseus::experts`` computes; with the matcher's sentence.
    """
    was_training = experts.training
    experts.train()  # a step that exists in training only, such as dropout, must not be overlooked
    try:
        reasons = []
        for width in _possible_widths(experts):
            reading = _read_at_width(experts, num_experts, width)
            if isinstance(reading, ExpertsReading):
                return reading
            reasons.append(reading)
    finally:
        experts.train(was_training)
    raise UnsupportedMoE(
        f"to be shared by ranks, {type(experts).__name__} must compute a weighted sum of expert MLPs, but "
        f"{'; '.join(reasons) or 'it holds no two stacked weights'}; prepare the model without ep_group"
    )


def _possible_widths(experts: nn.Module) -> list[int]:
    """Axis sizes that all stacked weights share: the model width D is one of them."""
    shapes = [parameter.shape[1:] for parameter in experts.parameters(recurse=False) if parameter.dim() == 3]
    return sorted(set.intersection(*map(set, shapes))) if shapes else []


def _read_at_width(experts: nn.Module, num_experts: int, width: int) -> ExpertsReading | str:
    """Runs the experts on zero tokens under Dynamo; the reading, or why there is none."""

    def layer(x_TD: Tensor, scores_TE: Tensor) -> Tensor:
        # A top-k tells the matcher that the ids are in range, which code for sentinel ids depends on.
        weights_TK, ids_TK = scores_TE.topk(min(_CHOICES, num_experts), dim=-1)
        return experts(x_TD, ids_TK, weights_TK)

    some = next(experts.parameters(recurse=False))
    x_TD = torch.zeros(_TOKENS, width, dtype=some.dtype, device=some.device)
    scores_TE = torch.zeros(_TOKENS, num_experts, dtype=some.dtype, device=some.device)
    graph = _GraphReader(x_TD)
    try:
        torch.compile(layer, backend=graph.read, fullgraph=True, dynamic=False)(x_TD, scores_TE)
    except Exception as error:  # the width may be a wrong guess, or Dynamo may not follow the code
        return f"it does not run on tokens of width {width}: {type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        reset_code(layer.__code__)  # Dynamo counts compilations per code object, and keeps what they hold
    return _reading(experts, graph.result, graph.inputs)


class _GraphReader:
    """A backend that matches the graph of ``layer``, and runs it as it is."""

    def __init__(self, x_TD: Tensor) -> None:
        self.result: MoEMatch | str = "Dynamo made no graph"
        self.inputs: dict[Node, Tensor] = {}  # what the placeholders stand for
        self._x_TD = x_TD

    def read(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.result = _only_match(gm)

        def run(*inputs: Any) -> Any:
            self.inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
            if isinstance(self.result, MoEMatch) and self.inputs.get(self.result.x_TD) is not self._x_TD:
                self.result = "it changes the tokens before its experts see them"
            return gm.forward(*inputs)

        return run


def _only_match(gm: GraphModule) -> MoEMatch | str:
    """The match that the whole graph is, but for the top-k at its start."""
    try:
        view = aten_view(gm)
    except CaptureError as error:
        return str(error)
    found = find_moe_layers(view)
    if len(found) != 1:
        return f"it holds {len(found)} layers of experts"
    (result,) = found
    if not isinstance(result, MoEMatch):
        return result.reason
    if result.weights_TK is None:
        return result.router_reason or "its experts are not summed"
    if not _are_parts_of_topk(result.weights_TK, result.ids_TK):
        return "it changes the ids or the routing weights before its experts see them"
    if any(view.origin[writer] not in result.region for writer in view.writers):
        return "it writes in place to what its experts see"
    if gm.graph.output_node().args[0] != (result.output,):
        return "something follows the weighted sum"
    return result


def _are_parts_of_topk(weights_TK: Node, ids_TK: Node) -> bool:
    parts = [node.args for node in (weights_TK, ids_TK) if node.target is operator.getitem]
    return len(parts) == 2 and parts[0][0] is parts[1][0] and [part[1] for part in parts] == [0, 1]


def _reading(experts: nn.Module, match: MoEMatch | str, inputs: dict[Node, Tensor]) -> ExpertsReading | str:
    if isinstance(match, str):
        return match
    if not isinstance(match.gate_up, Node):
        return "each of its experts has weights of its own"
    own = dict(experts.named_parameters())

    def name_of(node: Node | None) -> str | None:
        return next((name for name, value in own.items() if value is inputs.get(node)), None)

    nodes = [next(iter(nodes_of(weights)), None) for weights in match.experts]
    gate_up, gate_up_bias, down, down_bias = names = tuple(map(name_of, nodes))
    unused = set(own).difference(names)
    if unused:
        return f"its parameters {sorted(unused)} are no stacked weights or biases of the experts"
    if any(node is not None and name is None for node, name in zip(nodes, names, strict=True)):
        return "it computes the weights of its experts"
    return ExpertsReading(match.spec, (gate_up, gate_up_bias, down, down_bias))
