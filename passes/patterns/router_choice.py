"""How scores become weights and ids: top-k, gather, renormalise, cast, scale."""

from __future__ import annotations

import dataclasses
import operator

from torch.fx import Node

from ..interpret import CASTS, Reader, aten
from ..rule import Rule, Spelling
from ..values import (
    ChoiceScores,
    ChosenIds,
    ChosenScores,
    ChosenSum,
    GroupScores,
    GroupTopK,
    GroupView,
    Logits,
    Scores,
    TopK,
    Value,
)


def _topk(read: Reader, node: Node) -> Value | str | None:
    of = read.value(node.args[0])
    if not isinstance(of, (Logits, Scores, ChoiceScores, GroupView, GroupScores)):
        return None
    _, k, axis, largest = read.arguments(node, None, None, -1, True)[:4]
    if read.axis(node.args[0], axis) != read.dim(node.args[0]) - 1:
        return f"{read.describe(node)} must choose along the experts (the last axis), got axis {axis}"
    if not largest or not isinstance(k, int):
        return f"{read.describe(node)} must choose a constant number of the largest scores"
    return GroupTopK(of, k) if isinstance(of, GroupView) else TopK(of, k, node)


def _topk_part(read: Reader, node: Node) -> Value | None:
    value, part = read.value(node.args[0]), node.args[1]
    if isinstance(value, GroupTopK):
        return value if part == 0 else None
    if not isinstance(value, TopK):
        return None
    if part == 1:
        return ChosenIds(value)
    return ChosenScores(value) if part == 0 and isinstance(value.of, (Logits, Scores)) else None


def _chosen_scores(read: Reader, node: Node) -> Value | str | None:
    """scores.gather(1, ids): the weight comes from the scores without bias and group limit."""
    scores, ids = read.value(node.args[0]), read.value(node.args[2])
    if not isinstance(scores, Scores) or not isinstance(ids, ChosenIds):
        return None
    chosen_on = ids.topk.of.scores if isinstance(ids.topk.of, ChoiceScores) else ids.topk.of
    if chosen_on != scores or read.axis(node, node.args[1]) != 1:
        return f"{read.describe(node)} must gather the scores that the choice was made on"
    return ChosenScores(ids.topk)


def _softmax_of_chosen(read: Reader, node: Node) -> Value | str | None:
    chosen = read.value(node.args[0])
    if not isinstance(chosen, ChosenScores):
        return None
    if not isinstance(chosen.topk.of, Logits) or chosen != ChosenScores(chosen.topk):
        return f"{read.describe(node)} must be applied to the chosen logits alone"
    if read.axis(node, node.args[1]) != 1:
        return f"{read.describe(node)} must normalise over the choices of a token"
    return dataclasses.replace(chosen, softmax_dtype=read.dtype(node))


def _sum_of_chosen(read: Reader, node: Node) -> Value | None:
    chosen = read.value(node.args[0])
    keepdim = read.arguments(node, None, None, False)[2]
    if isinstance(chosen, ChosenScores) and keepdim and [axis % 2 for axis in node.args[1] or ()] == [1]:
        return ChosenSum(chosen) if read.dtype(node) == read.dtype(node.args[0]) else None
    return None


def _epsilon(read: Reader, node: Node) -> Value | None:
    total, epsilon = read.value(node.args[0]), read.number(node.args[1])
    if isinstance(total, ChosenSum) and total.epsilon is None and epsilon and node.kwargs.get("alpha", 1) == 1:
        return dataclasses.replace(total, epsilon=epsilon)
    return None


def _renormalize(read: Reader, node: Node) -> Value | str | None:
    chosen, total = read.value(node.args[0]), read.value(node.args[1])
    if not isinstance(chosen, ChosenScores):
        return None
    if not isinstance(total, ChosenSum) or total.scores != chosen:
        return f"{read.describe(node)} must divide the chosen scores by their own sum"
    if chosen != ChosenScores(chosen.topk):
        return f"{read.describe(node)} must renormalise before any other step"
    return dataclasses.replace(chosen, renormalized=True, epsilon=total.epsilon)


def _cast(read: Reader, node: Node) -> Value | str | None:
    chosen = read.value(node.args[0])
    if not isinstance(chosen, ChosenScores):
        return None
    if chosen.cast is not None or chosen.scale is not None:
        return f"{read.describe(node)} must cast the routing weights once, before they are scaled"
    return dataclasses.replace(chosen, cast=read.dtype(node))


def _scale(read: Reader, node: Node) -> Value | str | None:
    chosen, factor = read.value(node.args[0]), read.number(node.args[1])
    if not isinstance(chosen, ChosenScores):
        return None
    if factor is None or chosen.scale is not None:
        return f"{read.describe(node)} must scale the routing weights once, by a constant"
    return dataclasses.replace(chosen, scale=factor)


ROUTER_CHOICE = Spelling(
    name="router_choice",
    part="router choice",
    chain="topk, [gather], [softmax over the chosen], [/ (sum + eps)], [cast], [* scale]",
    rules=(
        Rule("top-k", (aten.topk.default,), _topk),
        Rule("part of top-k", (operator.getitem,), _topk_part),
        Rule("scores of the chosen", (aten.gather.default,), _chosen_scores),
        Rule("softmax over the chosen", (aten.softmax.int,), _softmax_of_chosen),
        Rule("sum of the chosen", (aten.sum.dim_IntList,), _sum_of_chosen),
        Rule("epsilon", (aten.add.Tensor,), _epsilon),
        Rule("renormalise", (aten.div.Tensor,), _renormalize),
        Rule("cast of weights", CASTS, _cast),
        Rule("scale of weights", (aten.mul.Tensor,), _scale),
    ),
    source="Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4-MoE, gpt-oss in transformers",
)
