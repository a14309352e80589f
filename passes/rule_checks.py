"""What did the rules make of the nodes of one layer? Reads what matching recorded; never edits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from ..facts import Check
from .interpret import Interpretation, aten
from .patterns.all_to_all import ALL_TO_ALL_OPS, WAIT_OPS
from .values import Combined

GATHERS = (aten.index.Tensor, aten.repeat_interleave.self_int)


def lost_steps(found: Interpretation, node: Node) -> set[Node]:
    """``node``, which has no meaning, and the steps without a meaning on the way of its row order."""
    read = found.reader
    lost, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            # The row order lives in [R] and [E] values, and in how the token rows are gathered and sent.
            step = read.dim(source) <= 1 or source.target in (
                *GATHERS,
                aten.unsqueeze.default,
                *ALL_TO_ALL_OPS,
                *WAIT_OPS,
            )
            step = step or source in found.sentences
            if step and source.op == "call_function" and read.value(source) is None and source not in lost:
                lost.add(source)
                pending.append(source)
    return lost


def rule_checks(
    found: Interpretation, ends: Iterable[Node], inputs: Iterable[Node] = (), lost: Iterable[Node] = ()
) -> list[Check]:
    """What the rules made of every node on the ways to ``ends``, in graph order.

    The ways begin at ``inputs``, at the sum of another layer, and at nodes that no rule reads. Of the latter, those in
    ``lost`` are listed too.
    """
    lost, stop = set(lost), set(inputs)
    pending = [*ends, *lost]
    kept = set(pending)
    while pending:
        for source in pending.pop().all_input_nodes:
            is_step = found.reader.value(source) is not None or source in found.sentences
            is_other_layer = isinstance(found.reader.value(source), Combined) and not _adds_up(found, source, kept)
            if is_step and not is_other_layer and source not in stop and source not in kept:
                kept.add(source)
                pending.append(source)
    return list(_as_checks(found, kept, lost))


def _adds_up(found: Interpretation, node: Node, kept: set[Node]) -> bool:
    """Whether the sum ``node`` is the one that a node of ``kept`` hands on."""
    own = found.reader.value(node)
    return any(found.reader.value(user) == own for user in node.users if user in kept)


def _as_checks(found: Interpretation, nodes: set[Node], lost: set[Node]) -> Iterator[Check]:
    for node in sorted(nodes):
        rule, value = found.rules.get(node), found.reader.value(node)
        if rule is None and node not in lost:
            continue  # it only repeats its source
        finding = _first_line(value) if value is not None else found.sentences.get(node, "no rule gives it a meaning")
        yield Check(
            stage="match",
            name=rule.name if rule is not None else "-",
            node=found.reader.describe(node),
            passed=value is not None,
            finding=finding,
        )


def _first_line(value: object) -> str:
    """What a meaning is, from its class: "TokenRows: [R, D]: the token of each routed row"."""
    first, *_ = (type(value).__doc__ or "").strip().splitlines() or [""]
    return f"{type(value).__name__}: " + first.removesuffix(".").replace("``", "'")
