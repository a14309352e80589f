"""Which activations does the op compute? Each is an expression over the two halves, or over all of the first linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...facts import Activation, GateLayout
from ..values import Expression, Number


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A number of the pattern that becomes a parameter of the op; ``sign`` -1 stands for its negative."""

    name: str
    sign: int = 1


@dataclasses.dataclass(frozen=True)
class GatePattern:
    """A gate function: its name in the op, its expression over "gate" and "up", its parameters in the op's order."""

    activation: Activation
    expression: Any
    parameters: tuple[str, ...] = ()


# Functions of one value: alone where there is no gate, times "up" where there is one.
_FUNCTIONS: tuple[tuple[Activation, Any], ...] = (
    ("silu", ("silu", "gate")),
    ("gelu", ("gelu", "gate")),
    ("gelu_tanh", ("gelu_tanh", "gate")),
    ("relu", ("relu", "gate")),
    ("relu2", ("square", ("relu", "gate"))),
)
_CLAMPED_GATE = ("clamp", "gate", None, _Parameter("limit"))
_CLAMPED_UP = ("clamp", "up", _Parameter("limit", -1), _Parameter("limit"))


def _softcap(value: str, cap: str) -> Any:
    return ("mul", ("tanh", ("div", value, _Parameter(cap))), _Parameter(cap))


GATE_PATTERNS = (
    *(GatePattern(name, ("mul", function, "up")) for name, function in _FUNCTIONS),
    GatePattern(
        "clamped_swiglu",  # gpt-oss
        (
            "mul",
            ("add", _CLAMPED_UP, Number(1.0)),
            ("mul", _CLAMPED_GATE, ("sigmoid", ("mul", _CLAMPED_GATE, _Parameter("alpha")))),
        ),
        parameters=("alpha", "limit"),
    ),
    GatePattern("clamped_silu", ("mul", ("silu", _CLAMPED_GATE), _CLAMPED_UP), parameters=("limit",)),
    GatePattern(
        "softcapped_silu",  # the sigmoid sees the gate itself
        ("mul", ("mul", _softcap("gate", "gate_cap"), ("sigmoid", "gate")), _softcap("up", "up_cap")),
        parameters=("gate_cap", "up_cap"),
    ),
)
_UNGATED_PATTERNS = tuple(GatePattern(name, function) for name, function in _FUNCTIONS)

_LAYOUTS: tuple[tuple[GateLayout, dict[str, str], tuple[GatePattern, ...]], ...] = (
    ("concatenated", {"gate": "first", "up": "second"}, GATE_PATTERNS),
    ("interleaved", {"gate": "even", "up": "odd"}, GATE_PATTERNS),
    ("none", {"gate": "all"}, _UNGATED_PATTERNS),
)
_COMMUTATIVE = ("mul", "add")


@dataclasses.dataclass(frozen=True)
class Gate:
    """A recognised gate function. ``numbers``: all numbers of its expression, the parameters among them."""

    activation: Activation
    layout: GateLayout
    parameters: tuple[Number, ...]
    numbers: tuple[Number, ...]

    @property
    def activation_params(self) -> tuple[float, ...]:
        return tuple(number.value for number in self.parameters)

    @property
    def symbols(self) -> tuple[torch.SymFloat | torch.SymInt, ...]:
        """The numbers that Dynamo made inputs."""
        return tuple(number.symbol for number in self.numbers if number.symbol is not None)


def recognize_gate(expression: Expression) -> Gate | str:
    """The gate function that ``expression`` is, or a sentence that shows it."""
    for layout, halves, patterns in _LAYOUTS:
        for pattern in patterns:
            bindings: dict[str, Number] = {}
            if _unify(pattern.expression, expression, halves, bindings):
                parameters = tuple(bindings[name] for name in pattern.parameters)
                return Gate(pattern.activation, layout, parameters, tuple(_numbers(expression)))
    known = ", ".join(pattern.activation for pattern in GATE_PATTERNS)
    return f"the gate between the two expert linears must be one of {known}, got {show(expression)}"


class GateOfBody(NamedTuple):
    """A recognised gate, and the first linear maps of each expert as the op wants them: all, or gate and up half."""

    gate: Gate
    order: tuple[int, ...]


def gate_of(expression: Expression, num_linears: int) -> GateOfBody | str:
    """The gate function of an ``ExpertBody`` with so many first linear maps, or a sentence that shows it."""
    if num_linears == 1:
        gate = recognize_gate(_with_names(expression, None))
        return gate if isinstance(gate, str) else GateOfBody(gate, (0,))
    if num_linears != 2:
        return f"an expert must have one or two linear maps before its gate, got {num_linears}"
    gate = recognize_gate(_with_names(expression, ("first", "second")))
    if not isinstance(gate, str):
        return GateOfBody(gate, (0, 1))
    swapped = recognize_gate(_with_names(expression, ("second", "first")))
    return gate if isinstance(swapped, str) else GateOfBody(swapped, (1, 0))


def _with_names(expression: Expression, names: tuple[str, str] | None) -> Expression:
    """With leaves as gates are written: halves of the only linear map, or ``names`` of two whole ones."""
    if not isinstance(expression, tuple):
        return expression
    head, *operands = expression
    if not isinstance(head, int):
        return (head, *(_with_names(operand, names) for operand in operands))
    (half,) = operands
    if names is None:
        return half
    return names[head] if half == "all" else f"{half} half of {names[head]}"


def _numbers(expression: Expression) -> Iterator[Number]:
    if isinstance(expression, Number):
        yield expression
    elif isinstance(expression, tuple):
        for operand in expression[1:]:
            yield from _numbers(operand)


def show(expression: Expression) -> str:
    if isinstance(expression, tuple):
        name, *operands = expression
        return f"{name}({', '.join(show(operand) for operand in operands)})"
    if isinstance(expression, Number):
        return f"{expression.value:g}"
    return str(expression)


def _unify(pattern: Any, expression: Expression, halves: dict[str, str], bindings: dict[str, Number]) -> bool:
    if isinstance(pattern, _Parameter):
        if not isinstance(expression, Number):
            return False
        number = expression if pattern.sign == 1 else Number(-expression.value, expression.symbol)
        return bindings.setdefault(pattern.name, number) == number
    if not isinstance(pattern, tuple):
        return expression == halves.get(pattern, pattern)
    if not isinstance(expression, tuple) or pattern[0] != expression[0] or len(pattern) != len(expression):
        return False
    orders = [expression[1:]]
    if pattern[0] in _COMMUTATIVE:
        orders.append(expression[:0:-1])
    for operands in orders:
        trial = dict(bindings)
        if all(_unify(p, e, halves, trial) for p, e in zip(pattern[1:], operands, strict=True)):
            bindings.update(trial)
            return True
    return False
