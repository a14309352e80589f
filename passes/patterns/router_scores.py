"""How a router scores experts: a linear map, softmax or sigmoid, a correction bias, a limit to the best groups."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.fx import Node

from ..interpret import CASTS, Reader, aten
from ..rule import Rule, Spelling
from ..values import (
    ChoiceScores,
    ChosenIds,
    GroupMask,
    GroupScores,
    GroupTopK,
    GroupView,
    Logits,
    Scores,
    Value,
)


def _logits(read: Reader, node: Node) -> Value | None:
    x, weight, bias = (*node.args, None)[:3]
    if not isinstance(x, Node) or not isinstance(weight, Node) or read.dim(x) != 2 or read.dim(weight) != 2:
        return None
    if bias is not None and not isinstance(bias, Node):
        return None
    bias = None if bias is None else read.root(bias)
    return Logits(read.cast_source(x), read.cast_source(weight), bias, read.dtype(x))


def _cast_logits(read: Reader, node: Node) -> Value | str | None:
    value = read.value(node.args[0])
    if not isinstance(value, Logits):
        return None
    if value.cast is not None or not read.holds(node, value.dtype):
        return f"{read.describe(node)} rounds the router logits to {read.dtype(node)}"
    return dataclasses.replace(value, cast=read.dtype(node))


def _softmax(read: Reader, node: Node) -> Value | None:
    logits = read.value(node.args[0])
    if isinstance(logits, Logits) and read.axis(node, node.args[1]) == 1:
        return Scores("softmax", logits, read.dtype(node))
    return None


def _sigmoid(read: Reader, node: Node) -> Value | None:
    logits = read.value(node.args[0])
    return Scores("sigmoid", logits, read.dtype(node)) if isinstance(logits, Logits) else None


def _correction_bias(read: Reader, node: Node) -> Value | None:
    """scores + bias [E]: what the choice is made on."""
    scores, bias = read.value(node.args[0]), node.args[1]
    if not isinstance(scores, Scores) or not isinstance(bias, Node) or read.dim(bias) != 1:
        return None
    if node.kwargs.get("alpha", 1) != 1 or not read.same_sizes(read.shape(bias), read.shape(node)[1:]):
        return None
    return ChoiceScores(scores, read.root(bias))


def _by_group(read: Reader, node: Node) -> Value | None:
    """[T, E] -> [T, G, E/G]."""
    value = read.value(node.args[0])
    if isinstance(value, Scores):
        value = ChoiceScores(value)
    if isinstance(value, ChoiceScores) and value.num_groups == 1 and read.dim(node) == 3:
        tokens, num_groups, _ = read.shape(node)
        if isinstance(num_groups, int) and read.same_sizes((tokens,), read.shape(node.args[0])[:1]):
            return GroupView(value, num_groups)
    return None


def _group_scores(read: Reader, node: Node) -> Value | str | None:
    """The sum of each group's two best scores."""
    best = read.value(node.args[0])
    if not isinstance(best, GroupTopK):
        return None
    _, axes, keepdim = read.arguments(node, None, None, False)[:3]
    if [axis % 3 for axis in axes or ()] != [2] or keepdim or best.k != 2:
        return f"{read.describe(node)} must sum the two best scores of each group, got the best {best.k}"
    if read.dtype(node) != read.dtype(node.args[0]):
        return f"{read.describe(node)} must sum the scores of a group in their own dtype, got {read.dtype(node)}"
    return GroupScores(best.view)


def _empty_mask(read: Reader, node: Node) -> Value | None:
    """zeros [T, G], to be filled with ones at the best groups."""
    scores = read.value(node.args[0])
    return GroupMask(scores, 0, "groups") if isinstance(scores, GroupScores) else None


def _fill_mask(read: Reader, node: Node) -> Value | str | None:
    mask, axis, ids, value = node.args[:4]
    empty, chosen = read.value(mask), read.value(ids)
    if not isinstance(empty, GroupMask) or not isinstance(chosen, ChosenIds):
        return None
    if empty.topk_groups or chosen.topk.of != empty.scores or axis not in (1, -1) or value != 1:
        return f"{read.describe(node)} must write 1 at the best groups of the same scores"
    return dataclasses.replace(empty, topk_groups=chosen.topk.k)


def _spread_mask(read: Reader, node: Node) -> Value | None:
    """[T, G] -> [T, G, 1] -> [T, G, E/G] -> [T, E]."""
    mask = read.value(node.args[0])
    if not isinstance(mask, GroupMask) or not mask.topk_groups:
        return None
    num_groups = mask.scores.view.num_groups
    num_experts = read.static_size(mask.scores.view.scores.scores.logits.weight, 0)
    sizes = read.shape(node)[1:]
    if num_experts is None:
        return None
    if mask.shape == "groups" and read.same_sizes(sizes, (num_groups, 1)):
        return dataclasses.replace(mask, shape="column")
    if mask.shape == "column" and read.same_sizes(sizes, (num_groups, num_experts // num_groups)):
        return dataclasses.replace(mask, shape="spread")
    if mask.shape == "spread" and read.same_sizes(sizes, (num_experts,)):
        return dataclasses.replace(mask, shape="experts")
    return None


def _mask_as_bool(read: Reader, node: Node) -> Value | None:
    mask = read.value(node.args[0])
    return mask if isinstance(mask, GroupMask) and read.dtype(node) == torch.bool else None


def _invert_mask(read: Reader, node: Node) -> Value | None:
    mask = read.value(node.args[0])
    if isinstance(mask, GroupMask) and read.dtype(node) == torch.bool:
        return dataclasses.replace(mask, inverted=not mask.inverted)
    return None


def _limit_to_groups(read: Reader, node: Node) -> Value | str | None:
    """Scores of experts outside the best groups become -inf."""
    scores, mask = read.value(node.args[0]), read.value(node.args[1])
    if isinstance(scores, Scores):
        scores = ChoiceScores(scores)
    if not isinstance(scores, ChoiceScores) or not isinstance(mask, GroupMask):
        return None
    if mask.shape != "experts" or not mask.inverted or mask.scores.view.scores != scores:
        return f"{read.describe(node)} must mask the experts outside the best groups of the same scores"
    if node.args[2] != -math.inf:
        return f"{read.describe(node)} must fill with -inf, so that no expert outside the groups is chosen"
    return dataclasses.replace(scores, num_groups=mask.scores.view.num_groups, topk_groups=mask.topk_groups)


ROUTER_SCORES = Spelling(
    name="router_scores",
    part="router scores",
    chain="linear, softmax or sigmoid, [+ bias], [group limit: view, topk 2, sum, topk, scatter, masked_fill]",
    rules=(
        Rule("router logits", (aten.linear.default,), _logits),
        Rule("cast of logits", CASTS, _cast_logits),
        Rule("softmax over experts", (aten.softmax.int,), _softmax),
        Rule("sigmoid of logits", (aten.sigmoid.default,), _sigmoid),
        Rule("correction bias", (aten.add.Tensor,), _correction_bias),
        Rule("scores by group", (aten.view.default, aten.reshape.default), _by_group),
        Rule("group scores", (aten.sum.dim_IntList,), _group_scores),
        Rule("empty group mask", (aten.zeros_like.default,), _empty_mask),
        Rule("best groups", (aten.scatter.value,), _fill_mask),
        Rule(
            "mask over experts",
            (aten.unsqueeze.default, aten.expand.default, aten.reshape.default, aten.view.default),
            _spread_mask,
        ),
        Rule("mask as bool", CASTS, _mask_as_bool),
        Rule("inverted mask", (aten.bitwise_not.default, aten.logical_not.default), _invert_mask),
        Rule("limit to groups", (aten.masked_fill.Scalar,), _limit_to_groups),
    ),
    source="Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4-MoE, gpt-oss in transformers",
)
