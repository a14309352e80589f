"""What is ``perseus::experts_parallel``? ``perseus::experts`` whose experts are spread over the ranks of a group.

An op of its own, so that a call on one device pays nothing for it. The group is an argument by name, so compiled graphs
can be cached and shared. Rank r of W owns the experts ``r * E/W`` to ``(r+1) * E/W - 1``; ids are global.

``tokens="split"``: every rank passes tokens of its own, any number of them. Rows go to the owners of their experts
and come back (two all-to-alls). Gradients of tokens and weights are those of this rank's loss, gradients of expert
tensors those of the sum of all ranks' losses.

``tokens="replicated"``: all ranks pass the same tokens, ids and weights; each runs its own experts, and the results are
summed over the ranks. All gradients are those of the one loss that the ranks share.

Meaning and order of sums: the choices of each rank's experts in choice order, then the ranks, in float32 (float64 for
float64 tokens). Same bits from run to run. Both directions are collective: every rank of the group must enter them.

Axes: T tokens, K choices per token, E experts over all ranks, D model width, R rows sent, S rows received.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from perseus_compile import lower
from perseus_compile.comm.exchange import Choices, Route, by_owner, sum_by_token, sum_over_ranks
from perseus_compile.comm.group import RankGroup, agree, find_group
from perseus_compile.errors import GroupError, PerseusError, UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, ParallelSpec, Tokens
from perseus_compile.grouped import scale, sum_dtype
from perseus_compile.lower import ExpertsArgs
from perseus_compile.ops import (
    EXPERT_DEFAULTS,
    EXPERT_TENSORS,
    empty_grads,
    experts_args,
    grads_by_input,
    no_second_derivative,
)

_NUMBERS = f"int num_experts, str group_name, {EXPERT_DEFAULTS}, str tokens='split', int max_tokens_per_rank=0"
SCHEMAS = (
    f"experts_parallel(Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {EXPERT_TENSORS}, {_NUMBERS}) -> Tensor",
    f"experts_parallel_backward(Tensor grad_TD, Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {EXPERT_TENSORS}, "
    f"bool[] needs_grad, {_NUMBERS}) -> Tensor[]",
)
_LIBRARY = torch.library.Library("perseus", "FRAGMENT")
_NUM_TENSORS = 7  # x, ids, weights, gate_up, gate_up_bias, down, down_bias
_NUMBER_NAMES = tuple(one.name for one in torch._C.parse_schema(SCHEMAS[0]).arguments)[_NUM_TENSORS:]
_SHARING_NAMES = frozenset(ParallelSpec.__dataclass_fields__)


class _Call(NamedTuple):
    """The arguments of one call."""

    tensors: tuple[Any, ...]
    spec: ExpertsSpec
    sharing: ParallelSpec
    group: RankGroup

    @property
    def args(self) -> ExpertsArgs:
        return experts_args(*self.tensors)

    def describe(self) -> str:
        """Everything that must be the same on all ranks, as text."""
        return _describe(self.args, dataclasses.replace(self.spec, expert_offset=0), self.sharing)


@functools.lru_cache(maxsize=4096)
def _describe(args: ExpertsArgs, spec: ExpertsSpec, sharing: ParallelSpec) -> str:
    named = zip(args._fields, args, strict=True)
    tensors = [f"{name} {arg.dtype} {list(arg.shape)}" for name, arg in named if arg is not None]
    return "; ".join([*tensors, str(spec), str(sharing)])


# ---- the call: everything is checked, and the ranks agree, before any rows move


def _enter(args: tuple[Any, ...], *, purpose: str, grad_TD: Tensor | None = None) -> tuple[_Call, Choices, Route]:
    """Reads the arguments of a call and agrees with the other ranks that all make it. Collective.

    ``purpose``: what else the ranks must agree on, such as the gradients that are asked for.
    """
    tensors = args[:_NUM_TENSORS]
    # The dispatcher leaves out the last numbers where they have their defaults.
    numbers = dict(zip(_NUMBER_NAMES, args[_NUM_TENSORS:], strict=False))
    sharing = ParallelSpec(**{name: numbers.pop(name) for name in _SHARING_NAMES.intersection(numbers)})
    call = _Call(tensors, ExpertsSpec.from_kwargs(numbers), sharing, find_group(sharing.group_name))
    group, (x_TD, ids_TK) = call.group, tensors[:2]
    text: str | PerseusError
    choices = Choices(ids_TK, ids_TK.new_empty(0), [0] * group.size)
    try:
        _check(call, grad_TD)
        choices = by_owner(ids_TK, tensors[3].shape[0], group.size)
        text = f"{purpose}: {call.describe()}"
    except PerseusError as error:
        text = error
    table = agree(group, x_TD.device, text, [x_TD.shape[0], *choices.num_sent])
    _check_token_counts(call, [row[0] for row in table])
    return call, choices, Route(group, choices.num_sent, [row[1 + group.rank] for row in table])


def _check(call: _Call, grad_TD: Tensor | None) -> None:
    """Whether this rank can make the call.

    Raises:
        UnsupportedMoE: it cannot.
    """
    lower.check_experts(call.args, call.spec)
    x_TD, ids_TK, weights_TK, gate_up = call.tensors[:4]
    lower.check_tokens(x_TD, ids=ids_TK, weights=weights_TK, **({} if grad_TD is None else {"grad": grad_TD}))
    if call.sharing.tokens not in get_args(Tokens):
        raise UnsupportedMoE(
            f"tokens must be 'split' or 'replicated', got {call.sharing.tokens!r}; pass 'split' where each rank has "
            "tokens of its own, 'replicated' where all have the same"
        )
    if call.sharing.max_tokens_per_rank < 0:
        raise UnsupportedMoE(
            f"max_tokens_per_rank must be a token count, or 0 for no limit, got {call.sharing.max_tokens_per_rank}; "
            "pass 0"
        )
    num_local, group, spec = gate_up.shape[0], call.group, call.spec
    if num_local * group.size != spec.num_experts or spec.expert_offset != num_local * group.rank:
        raise UnsupportedMoE(
            f"each of the {group.size} ranks of group {group.name!r} must hold an equal part of the "
            f"num_experts={spec.num_experts} experts, in rank order, got {num_local} experts from "
            f"expert_offset={spec.expert_offset} on rank {group.rank}; "
            "let perseus_compile.prepare(model, ep_group=group) share them out"
        )


def _check_token_counts(call: _Call, num_tokens: list[int]) -> None:
    """Raises on every rank, since every rank knows all counts."""
    limit = call.sharing.max_tokens_per_rank
    if limit and max(num_tokens) > limit:
        rank = num_tokens.index(max(num_tokens))
        raise GroupError(
            f"every rank may pass at most max_tokens_per_rank={limit} tokens, got {num_tokens[rank]} on rank {rank} of "
            f"group {call.group.name!r}; raise the limit on all ranks, or split the batch"
        )
    if call.sharing.tokens == "replicated" and len(set(num_tokens)) > 1:
        raise GroupError(
            f"with tokens='replicated' all ranks of group {call.group.name!r} must pass the same tokens, got "
            f"{num_tokens} tokens by rank; pass tokens='split' where ranks have tokens of their own"
        )


# ---- perseus::experts_parallel


def _experts_parallel(*args: Any) -> Tensor:
    call, choices, route = _enter(args, purpose="forward")
    x_TD, ids_TK, weights_TK, *experts = call.tensors
    is_split = call.sharing.tokens == "split"
    choices_R = choices.sent_R if is_split else choices.of_rank(call.group.rank)
    rows_RD = x_TD.index_select(0, choices_R // max(1, ids_TK.shape[1]))
    ids_R = ids_TK.reshape(-1).index_select(0, choices_R)
    on_output = call.spec.weight_on == "output"
    if not on_output:
        weights_R1 = weights_TK.reshape(-1, 1).index_select(0, choices_R)
        rows_RD = scale(rows_RD, weights_R1.to(sum_dtype(x_TD.dtype)))
    if is_split:
        y_RD = route.back(_rows_of_experts(route.to_owners(rows_RD), route.to_owners(ids_R), experts, call.spec))
    else:
        y_RD = _rows_of_experts(rows_RD, ids_R, experts, call.spec)
    sum_TD = sum_by_token(y_RD, choices_R, choices.owners_TK, weights_TK if on_output else None)
    return sum_TD.to(x_TD.dtype) if is_split else sum_over_ranks(call.group, sum_TD, x_TD.dtype)


def _rows_of_experts(rows_SD: Tensor, ids_S: Tensor, experts: list[Any], spec: ExpertsSpec) -> Tensor:
    """The expert of each row, without a routing weight."""
    ids_S1 = ids_S.unsqueeze(1)
    ones_S1 = torch.ones_like(ids_S1, dtype=rows_SD.dtype)
    return torch.ops.perseus.experts(rows_SD, ids_S1, ones_S1, *experts, **spec.as_kwargs())


def _experts_parallel_fake(*args: Any) -> Tensor:
    # Nothing is checked here: an error of one rank alone would leave the others waiting, so the call itself checks.
    x_TD = args[0]
    return x_TD.new_empty(x_TD.shape)


# ---- perseus::experts_parallel_backward


def _experts_parallel_backward(grad_TD: Tensor, *args: Any) -> list[Tensor]:
    needs_grad = args[_NUM_TENSORS]
    of_forward = (*args[:_NUM_TENSORS], *args[_NUM_TENSORS + 1 :])
    # All ranks must ask for the same gradients, since some are exchanged.
    call, choices, route = _enter(of_forward, purpose=f"backward {needs_grad}", grad_TD=grad_TD)
    if call.sharing.tokens == "replicated":
        return _replicated_backward(call, grad_TD, needs_grad)
    return _split_backward(call, choices, route, grad_TD, needs_grad)


def _replicated_backward(call: _Call, grad_TD: Tensor, needs_grad: list[bool]) -> list[Tensor]:
    """Every rank has the whole gradient of the output, and the part of its experts in the gradients of the inputs."""
    grads = torch.ops.perseus.experts_backward(grad_TD, *call.tensors, needs_grad, **call.spec.as_kwargs())
    num_shared = sum(needs_grad[:2])  # those of x and weights
    shared = [sum_over_ranks(call.group, grad.to(sum_dtype(grad.dtype)), grad.dtype) for grad in grads[:num_shared]]
    return [*shared, *grads[num_shared:]]


def _split_backward(
    call: _Call, choices: Choices, route: Route, grad_TD: Tensor, needs_grad: list[bool]
) -> list[Tensor]:
    """Each owner differentiates its experts on the rows that it is sent again, with the gradients of their tokens."""
    x_TD, ids_TK, weights_TK, *experts = call.tensors
    tokens_R = choices.sent_R // max(1, ids_TK.shape[1])
    x_SD = route.to_owners(x_TD.index_select(0, tokens_R))
    grad_SD = route.to_owners(grad_TD.index_select(0, tokens_R))
    ids_S1 = route.to_owners(ids_TK.reshape(-1, 1).index_select(0, choices.sent_R))
    weights_S1 = route.to_owners(weights_TK.reshape(-1, 1).index_select(0, choices.sent_R))
    of_owner = iter(
        torch.ops.perseus.experts_backward(
            grad_SD, x_SD, ids_S1, weights_S1, *experts, needs_grad, **call.spec.as_kwargs()
        )
    )
    need_x, need_weights, *_ = needs_grad
    grads = []
    if need_x:
        rows_RD = route.back(next(of_owner))
        grads.append(sum_by_token(rows_RD, choices.sent_R, choices.owners_TK, None).to(x_TD.dtype))
    if need_weights:
        grad_weights = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format).view(-1, 1)
        grads.append(grad_weights.index_copy_(0, choices.sent_R, route.back(next(of_owner))).view(weights_TK.shape))
    return [*grads, *of_owner]


def _experts_parallel_backward_fake(grad_TD: Tensor, *args: Any) -> list[Tensor]:
    x_TD, _, *rest = args[:_NUM_TENSORS]
    return empty_grads((x_TD, *rest), args[_NUM_TENSORS])


# ---- autograd and registration


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.numbers = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    need_x, _, *need_rest = ctx.needs_input_grad[:_NUM_TENSORS]
    needs_grad = [need_x, *need_rest]
    grads = torch.ops.perseus.experts_parallel_backward(grad_TD, *ctx.saved_tensors, needs_grad, *ctx.numbers)
    grad_x, *grad_rest = grads_by_input(grads, needs_grad)
    return grad_x, None, *grad_rest, *(None for _ in ctx.numbers)


def _register() -> None:
    # The calls exchange sizes through the host, which no CUDA graph can hold.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
    kernels = {"experts_parallel": _experts_parallel, "experts_parallel_backward": _experts_parallel_backward}
    fakes: dict[str, Callable[..., Any]] = {
        "experts_parallel": _experts_parallel_fake,
        "experts_parallel_backward": _experts_parallel_backward_fake,
    }
    for schema in SCHEMAS:
        _LIBRARY.define(schema, tags=tags)
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"perseus::{name}", fakes[name], lib=_LIBRARY)
    torch.library.register_autograd(
        "perseus::experts_parallel", _differentiate, setup_context=_save_inputs, lib=_LIBRARY
    )
    torch.library.register_autograd(
        "perseus::experts_parallel_backward", no_second_derivative("experts_parallel"), lib=_LIBRARY
    )


_register()
