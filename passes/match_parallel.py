"""Which ranks share the experts of a match, and which nodes only carried their rows? Reads; never edits."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch.fx import Graph, Node

from ..capture import CHECKS
from ..facts import ParallelSpec
from ..process_groups import rank_in, size_of
from .id_bound import id_bound
from .interpret import Reader
from .parallel_values import ForeignMask, OwnIds, OwnWeights, RankCounts
from .values import Combined, ExpertOutput


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the experts of a layer lie on ranks, and what the layer chose from all of them.

    ``spec`` is None where this rank's experts are a layer of their own, whose sum the code adds up over ranks itself.
    """

    spec: ParallelSpec | None
    num_experts: int
    expert_offset: int
    ids: Node
    weights: Node


def sharing_of(read: Reader, combined: Combined) -> Sharing | str | None:
    """How the experts of a layer lie on ranks; None where all are here; or why they are no part of one layer."""
    output = combined.output
    assert output.weights is not None, "only weighted rows are grouped by token"
    num_local = read.static_size(output.hidden.gate_up.weight, 0)
    assert num_local is not None, "expert weights have constant sizes"
    if output.hidden.rows.dispatch is not None:
        return _split(output, output.hidden.rows.dispatch.counts, output.weights, num_local)
    own = read.value(output.hidden.ids)
    return _replicated(read, combined, own.mask, num_local) if isinstance(own, OwnIds) else None


def _split(output: ExpertOutput, counts: RankCounts, weights: Node, num_local: int) -> Sharing | str:
    """Every rank has tokens of its own, whose rows travel."""
    group, num_experts = counts.group, counts.num_experts
    rank, size = rank_in(group), size_of(group)
    if group is None or rank is None or size is None:
        return f"its process group {group!r} does not exist in this process"
    if size != counts.num_ranks:
        return f"it sends rows to {counts.num_ranks} ranks, but its group {group!r} has {size}"
    if num_local * size != num_experts:
        return f"it holds {num_local} experts on each of {size} ranks, but counts rows of {num_experts} experts"
    spec = ParallelSpec(group_name=group, tokens="split")
    return Sharing(spec, num_experts, rank * num_local, output.hidden.ids, weights)


def _replicated(read: Reader, combined: Combined, mask: ForeignMask, num_local: int) -> Sharing | str:
    """All ranks have the same tokens, and each skips the choices of others."""
    assert combined.output.weights is not None, "only weighted rows are grouped by token"
    weights = read.value(combined.output.weights)
    if not isinstance(weights, OwnWeights) or weights.mask != mask:
        return "it marks the ids of other ranks' experts, but does not give these choices the weight 0"
    if num_local != mask.num_local:
        return f"it holds {num_local} experts, but marks the ids of other ranks as if it had {mask.num_local}"
    num_experts = id_bound(read, mask.ids)
    if num_experts is None or num_experts % num_local or not 0 <= mask.rank < num_experts // num_local:
        return f"ids below {num_experts} do not name experts of rank {mask.rank} with {num_local} experts per rank"
    group = combined.group
    if group is not None and (rank_in(group), size_of(group)) != (mask.rank, num_experts // num_local):
        return (
            f"this process is rank {rank_in(group)} of {size_of(group)} in its group {group!r}, but it has the experts "
            f"of rank {mask.rank} of {num_experts // num_local}"
        )
    spec = None if group is None else ParallelSpec(group_name=group, tokens="replicated")
    return Sharing(spec, num_experts, mask.rank * num_local, mask.ids, weights.weights)


def with_sizes(graph: Graph, region: frozenset[Node], inputs: frozenset[Node]) -> frozenset[Node]:
    """``region`` of Dynamo's ``graph``, and what computes or checks only the sizes of its rows.

    These are the counts that the host reads, and the checks that Dynamo adds where it reads them.
    """
    nodes, pending = set(region), list(region)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in nodes and source not in inputs and _is_size_or_count(source):
                nodes.add(source)
                pending.append(source)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if sources and node not in nodes and nodes.issuperset(sources) and (node.target in CHECKS or _is_number(node)):
            nodes.add(node)
    return frozenset(nodes)


def _is_size_or_count(node: Node) -> bool:
    value = node.meta.get("example_value")
    if value is None and node.target is operator.getitem:  # Dynamo records none on the steps of tolist()
        return _is_size_or_count(node.all_input_nodes[0])
    is_count = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return node.op != "placeholder" and (is_count or _is_number(node))


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, torch.SymInt, torch.SymBool))
