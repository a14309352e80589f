"""Which experts does each token go to, and with which weights? Plain differentiable torch ops, nothing else.

Bit-identical to the routers of Hugging Face's Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4-MoE and gpt-oss:
the same torch ops in the same order, so that a rewrite never changes a choice.

Axes: T tokens, K choices per token, E experts, D model width, G expert groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    *,
    routing: str,
    top_k: int,
    renormalize: bool,
    renormalize_eps: float,
    routing_scale: float,
    num_groups: int,
    topk_groups: int,
    router_dtype: torch.dtype,
    score_dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Routing weights [T, K] in ``weights_dtype`` and int64 expert ids [T, K]; ``facts.RoutingSpec`` has the numbers.

    The arguments are taken to be legal: ``lower.check_routing`` is the one statement of what is.
    """
    return choose(
        logits(x_TD, weight_ED, bias_E, router_dtype),
        correction_bias_E,
        routing=routing,
        top_k=top_k,
        renormalize=renormalize,
        renormalize_eps=renormalize_eps,
        routing_scale=routing_scale,
        num_groups=num_groups,
        topk_groups=topk_groups,
        score_dtype=score_dtype,
        weights_dtype=weights_dtype,
    )


def logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """The first half of ``route``: scores [T, E] before any softmax or sigmoid, computed in ``router_dtype``."""
    bias_E = None if bias_E is None else _cast(bias_E, router_dtype)
    return F.linear(_cast(x_TD, router_dtype), _cast(weight_ED, router_dtype), bias_E)


def choose(
    logits_TE: Tensor,
    correction_bias_E: Tensor | None,
    *,
    routing: str,
    top_k: int,
    renormalize: bool,
    renormalize_eps: float,
    routing_scale: float,
    num_groups: int,
    topk_groups: int,
    score_dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The second half of ``route``: weights and ids [T, K] from the logits."""
    if routing == "softmax_topk":
        weights_TK, ids_TK = torch.topk(F.softmax(logits_TE, dim=-1, dtype=score_dtype), top_k, dim=-1)
    elif routing == "topk_softmax":
        top_logits_TK, ids_TK = torch.topk(logits_TE, top_k, dim=-1)
        weights_TK = F.softmax(top_logits_TK, dim=-1, dtype=score_dtype)
    else:
        scores_TE = logits_TE.to(score_dtype).sigmoid()
        choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E
        if num_groups > 1:
            choice_TE = _keep_best_groups(choice_TE, num_groups, topk_groups)
        # NOTE: unsorted, as the models do; the order of the choices is the order of the weighted sum.
        ids_TK = torch.topk(choice_TE, top_k, dim=-1, sorted=False)[1]
        weights_TK = scores_TE.gather(1, ids_TK)

    if renormalize:
        total_T1 = weights_TK.sum(dim=-1, keepdim=True)
        weights_TK = weights_TK / (total_T1 + renormalize_eps if renormalize_eps else total_T1)
    weights_TK = _cast(weights_TK, weights_dtype)
    return (weights_TK if routing_scale == 1.0 else weights_TK * routing_scale), ids_TK


def _keep_best_groups(choice_TE: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Scores with -inf outside the ``topk_groups`` groups whose two best scores have the largest sum."""
    choice_TGE = choice_TE.unflatten(1, (num_groups, -1))
    group_scores_TG = choice_TGE.topk(2, dim=-1)[0].sum(dim=-1)
    best_groups = torch.topk(group_scores_TG, topk_groups, dim=-1, sorted=False)[1]
    drop_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(1, best_groups, False)
    return choice_TGE.masked_fill(drop_TG.unsqueeze(-1), float("-inf")).flatten(1)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which costs a microsecond even where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
