"""Which higher-order operators only wait for a collective? Torch 2.11 writes the wait of one with gradients so.

It is an autograd function whose forward waits and whose backward hands the gradient on, which is the derivative of a
wait, so that the wait can be read like any other. All other autograd functions stay opaque.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

_WAIT = torch.ops._c10d_functional.wait_tensor


def waited_for(n: Node, module: torch.nn.Module) -> Node | None:
    """The node of Dynamo's graph whose collective ``n`` waits for; None if ``n`` does anything else.

    Args:
        module: the graph module of ``n``.
    """
    if n.target is not torch.ops.higher_order.autograd_function_apply:
        return None
    forward, backward = (getattr(module, str(body.target), None) for body in n.args[:2] if isinstance(body, Node))
    if not isinstance(forward, GraphModule) or not isinstance(backward, GraphModule):
        return None
    sources = n.args[2:]
    awaited = _only_waits_for(forward)
    if awaited is None or awaited >= len(sources) or not _hands_on(backward, awaited, len(sources)):
        return None
    source = sources[awaited]
    return source if isinstance(source, Node) else None


def _only_waits_for(forward: GraphModule) -> int | None:
    """Which argument it waits for, if it does nothing else and returns that."""
    arguments, calls, outputs = _parts(forward)
    if len(calls) != 1 or getattr(calls[0].target, "overloadpacket", calls[0].target) is not _WAIT:
        return None
    results = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
    source = calls[0].args[0]
    return arguments.index(source) if list(results) == calls and source in arguments else None


def _hands_on(backward: GraphModule, awaited: int, num_arguments: int) -> bool:
    """Whether the gradient of argument ``awaited`` is the one that comes, and no other argument has one."""
    arguments, calls, outputs = _parts(backward)
    wanted = [arguments[0] if position == awaited else None for position in range(num_arguments)]
    return not calls and list(outputs) == wanted


def _parts(body: GraphModule) -> tuple[list[Node], list[Node], Any]:
    """Arguments, calls other than switches of the gradient mode, and results."""
    nodes = list(body.graph.nodes)
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    calls = [node for node in calls if node.target is not torch._C._set_grad_enabled]
    (output,) = body.graph.find_nodes(op="output")
    results = output.args[0]
    return body.graph.find_nodes(op="placeholder"), calls, results if isinstance(results, (list, tuple)) else (results,)
