"""What is ``perseus::experts_list``? ``perseus::experts`` for weights that are separate tensors, and its derivative.

The lists hold one tensor per expert, E matrices [2F, D] and E [D, F] for ``weight_layout="out_in"``. ``gate_up`` may
hold 2E matrices [F, D] instead, all gates before all up halves, with ``gate_layout="concatenated"``; its biases then do
too. An empty list of biases means none. Everything else means what it means in ``perseus::experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perseus_compile import grouped, listed_experts, lower
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec
from perseus_compile.lower import check_tokens, token_arg, whole_arg
from perseus_compile.ops import EXPERT_DEFAULTS, empty_grads, experts_spec, grads_by_input, no_second_derivative

_LISTS = "Tensor[] gate_up, Tensor[] gate_up_bias, Tensor[] down, Tensor[] down_bias"
_NUMBERS = f"int num_experts, {EXPERT_DEFAULTS}"
SCHEMAS = {
    "experts_list": f"experts_list(Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {_LISTS}, {_NUMBERS}) -> Tensor",
    "experts_list_backward": (
        f"experts_list_backward(Tensor grad_TD, Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {_LISTS}, "
        f"bool[] needs_grad, {_NUMBERS}) -> Tensor[]"
    ),
}
_NUM_TENSORS = 7  # arguments that are tensors or lists of tensors: x, ids, weights and the four lists
_NUM_TOKEN_TENSORS = 3

_LIBRARY = torch.library.Library("perseus", "FRAGMENT")


class _Call(NamedTuple):
    """The arguments of a call, by meaning."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    experts: listed_experts.ListedWeights
    spec: ExpertsSpec


def _checked(args: Sequence[Any]) -> _Call:
    tokens, lists, numbers = args[:_NUM_TOKEN_TENSORS], args[_NUM_TOKEN_TENSORS:_NUM_TENSORS], args[_NUM_TENSORS:]
    spec = experts_spec(tuple(numbers))
    facts = [[whole_arg(tensor) for tensor in tensors] for tensors in lists]
    lower.check_experts(lower.listed_args([token_arg(tensor) for tensor in tokens], facts, spec), spec)
    x_TD, ids_TK, weights_TK = tokens
    check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    gate_up, gate_up_bias, down, down_bias = lists
    in_out = spec.weight_layout == "in_out"
    experts = listed_experts.ListedWeights(gate_up, gate_up_bias, down, down_bias, in_out)
    return _Call(x_TD, ids_TK, weights_TK, experts, spec)


def _forward(*args: Any) -> Tensor:
    call = _checked(args)
    if _is_captured(call.x_TD):
        return _forward_of_stacks(call)
    return listed_experts.forward(call.x_TD, call.ids_TK, call.weights_TK, call.experts, call.spec)


def _forward_fake(*args: Any) -> Tensor:
    x_TD = _checked(args).x_TD
    return x_TD.new_empty(x_TD.shape)


def _split_backward(args: Sequence[Any]) -> tuple[_Call, list[bool], Sequence[Any]]:
    numbers = args[_NUM_TENSORS + 1 :]
    return _checked((*args[:_NUM_TENSORS], *numbers)), args[_NUM_TENSORS], numbers


def _backward(grad_TD: Tensor, *args: Any) -> list[Tensor]:
    call, needs_grad, numbers = _split_backward(args)
    check_tokens(call.x_TD, grad=grad_TD)
    if _is_captured(grad_TD):
        return _backward_of_stacks(grad_TD, call, numbers, needs_grad)
    return listed_experts.backward(
        grad_TD, call.x_TD, call.ids_TK, call.weights_TK, call.experts, call.spec, needs_grad
    )


def _backward_fake(grad_TD: Tensor, *args: Any) -> list[Tensor]:
    call, needs_grad, _ = _split_backward(args)
    check_tokens(call.x_TD, grad=grad_TD)
    return empty_grads((call.x_TD, call.weights_TK, *call.experts.all()), needs_grad)


# ---- under a CUDA graph capture, where no count can be read: the weights are stacked, and copied by that, and take the
# plain path, since a capture is no time to load the fused kernel, which calls outside of it have no use for


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _stacks(experts: listed_experts.ListedWeights) -> list[Tensor | None]:
    """gate_up, gate_up_bias, down and down_bias of ``perseus::experts``."""
    output_axis = 1 if experts.in_out else 0
    return [
        _joined(experts.gate_up, experts.num_experts, output_axis),
        _joined(experts.gate_up_bias, experts.num_experts, 0) if experts.gate_up_bias else None,
        torch.stack(list(experts.down)),
        torch.stack(list(experts.down_bias)) if experts.down_bias else None,
    ]


def _joined(tensors: Sequence[Tensor], num_experts: int, output_axis: int) -> Tensor:
    """The stack of the tensors of each expert, several of them side by side along their output axis."""
    pieces = [torch.stack(list(tensors[start : start + num_experts])) for start in range(0, len(tensors), num_experts)]
    return torch.cat(pieces, dim=1 + output_axis)


def _forward_of_stacks(call: _Call) -> Tensor:
    gate_up, gate_up_bias, down, down_bias = _stacks(call.experts)
    assert gate_up is not None and down is not None
    reason = grouped.unsupported_reason(call.x_TD, gate_up, down, call.spec)
    if reason is not None:
        raise UnsupportedMoE(
            "experts whose weights are separate tensors can be captured in a CUDA graph only as grouped GEMMs: "
            f"{reason}; run them outside of the graph"
        )
    tokens = (call.x_TD, call.ids_TK, call.weights_TK)
    return grouped.forward(*tokens, gate_up, gate_up_bias, down, down_bias, call.spec)


def _backward_of_stacks(
    grad_TD: Tensor, call: _Call, numbers: Sequence[Any], needs_grad: Sequence[bool]
) -> list[Tensor]:
    experts = call.experts
    need_x, need_weights, *need_all = needs_grad
    left = iter(need_all)
    need_lists = [[next(left) for _ in tensors] for tensors in experts.lists()]
    wanted = [need_x, need_weights, *(any(needs) for needs in need_lists)]
    tokens = (call.x_TD, call.ids_TK, call.weights_TK)
    found = torch.ops.perseus.experts_backward(grad_TD, *tokens, *_stacks(experts), wanted, *numbers)
    grad_x_TD, grad_weights_TK, *of_stacks = grads_by_input(found, wanted)
    grads = [grad for grad in (grad_x_TD, grad_weights_TK) if grad is not None]
    for tensors, needs, of_stack in zip(experts.lists(), need_lists, of_stacks, strict=True):
        if of_stack is not None:
            output_axis = 1 if experts.in_out and tensors[0].dim() == 2 else 0
            pieces = of_stack.chunk(len(tensors) // experts.num_experts, dim=1 + output_axis)
            each = [grad.contiguous() for piece in pieces for grad in piece.unbind()]
            grads += [grad for grad, needed in zip(each, needs, strict=True) if needed]
    return grads


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TOKEN_TENSORS], *(one for each in _lists(inputs) for one in each))
    ctx.lengths = [len(each) for each in _lists(inputs)]
    ctx.numbers = inputs[_NUM_TENSORS:]


def _lists(args: Sequence[Any]) -> Sequence[Sequence[Tensor]]:
    return args[_NUM_TOKEN_TENSORS:_NUM_TENSORS]


def _derivative(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    tokens = [next(saved) for _ in range(_NUM_TOKEN_TENSORS)]
    lists = [[next(saved) for _ in range(length)] for length in ctx.lengths]
    need_x, _, need_weights, *need_lists = ctx.needs_input_grad[:_NUM_TENSORS]
    needs_grad = [need_x, need_weights, *(needed for each in need_lists for needed in each)]
    found = torch.ops.perseus.experts_list_backward(grad_TD, *tokens, *lists, needs_grad, *ctx.numbers)
    grad_x, grad_weights, *grads = grads_by_input(found, needs_grad)
    following = iter(grads)
    grads_of_lists = [[next(following) for _ in each] for each in need_lists]
    # NOTE: torch takes an empty list for a list of tensors, and wants a list back; it passed no defaults at the end.
    given = ctx.numbers[: len(ctx.needs_input_grad) - _NUM_TENSORS]
    of_numbers: list[Any] = [[] if number == [] else None for number in given]
    return grad_x, None, grad_weights, *grads_of_lists, *of_numbers


def _register() -> None:
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "experts_list": (_forward, _forward_fake),
        "experts_list_backward": (_backward, _backward_fake),
    }
    for name, (kernel, fake) in implementations.items():
        _LIBRARY.define(SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        _LIBRARY.impl(name, kernel, "CPU")
        _LIBRARY.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"perseus::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd("perseus::experts_list", _derivative, setup_context=_save, lib=_LIBRARY)
    torch.library.register_autograd(
        "perseus::experts_list_backward", no_second_derivative("experts_list"), lib=_LIBRARY
    )


_register()
