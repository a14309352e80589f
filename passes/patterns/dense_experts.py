"""All experts on all tokens at once: batched products with every expert's weights, then a sum by dense weights."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ...facts import WeightLayout
from ..expert_body import Product, product_of_matrix, read_body
from ..in_place import local_form
from ..interpret import CASTS, Reader, aten
from ..loop_values import Axis, DenseSum, DenseTerm, DenseWeights, ExpertBody
from ..rule import Rule, Spelling
from ..values import ExpertLinear, SwappedMatrix, Value

_BY_TOKEN: tuple[Axis, ...] = ("token", "expert")
_BY_EXPERT: tuple[Axis, ...] = ("expert", "token")


# ---- linear maps of all experts


def product_of_stack(read: Reader, node: Node) -> Product | None:
    """einsum, bmm or matmul of tokens, or of what the experts made of them, with stacked weights, and such + bias."""
    if read.dim(node) != 3:
        return None
    if node.target is aten.einsum.default:
        return _einsum(read, node)
    if node.target in (aten.bmm.default, aten.matmul.default):
        return _batched(read, node)
    if local_form(node) is aten.add.Tensor and not node.kwargs and isinstance(node.args[0], Node):
        product = product_of_stack(read, read.root(node.args[0]))
        return _with_bias(read, node, product) if product is not None else None
    return None


def _einsum(read: Reader, node: Node) -> Product | None:
    inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
    letters, operands = inputs.split(","), node.args[1]
    if len(operands) != 2 or len(letters) != 2 or len(set(out)) != 3:
        return None
    # The features that come out are an axis of the weights alone, and the last of the result.
    which = 1 if out[-1] in letters[1] else 0
    rows, weight, of_rows, of_weight = operands[1 - which], operands[which], letters[1 - which], letters[which]
    expert, summed = of_weight[:1], of_rows[-1:]
    layouts: dict[str, WeightLayout] = {expert + out[-1] + summed: "out_in", expert + summed + out[-1]: "in_out"}
    layout = layouts.get(of_weight)
    token = out[:2].replace(expert, "")
    axes = _BY_TOKEN if out[:2] == token + expert else _BY_EXPERT
    if layout is None or len(token) != 1 or len({token, expert, summed, out[-1]}) != 4 or read.dim(weight) != 3:
        return None
    if of_rows not in (token + summed, token + expert + summed, expert + token + summed):
        return None
    rows_axes: tuple[Axis, ...] = () if len(of_rows) == 2 else _BY_TOKEN if of_rows[0] == token else _BY_EXPERT
    return Product(rows, ExpertLinear(read.root(weight), layout), axes, rows_axes)


def _batched(read: Reader, node: Node) -> Product | None:
    """[E, T, a] @ [E, a, b], where the first may be the tokens repeated for each expert."""
    rows, matrix = node.args[:2]
    swapped = read.value(matrix)
    if read.dim(matrix) != 3:
        return None
    linear = ExpertLinear(read.root(matrix), "in_out")
    if isinstance(swapped, SwappedMatrix):
        linear = ExpertLinear(swapped.of, "out_in")
    tokens = _repeated(read, rows, linear)
    if tokens is not None:
        return Product(tokens, linear, _BY_EXPERT)
    return Product(rows, linear, _BY_EXPERT, _BY_EXPERT) if read.dim(rows) == 3 else None


def _repeated(read: Reader, rows: Node, linear: ExpertLinear) -> Node | None:
    """The tokens that ``rows`` repeats for each expert, by expand, repeat or broadcasting."""
    if read.dim(rows) == 2:
        return rows
    node = read.root(rows)
    if node.target in (aten.expand.default, aten.repeat.default):
        counts = list(node.args[1])
        is_once = len(counts) == 3 and counts[1:] in ([1, 1], [-1, -1])
        is_once = is_once or (node.target is aten.expand.default and read.dim(node) == 3)
        source = node.args[0]
        if not is_once or not read.same_sizes(read.shape(node)[:1], read.shape(linear.weight)[:1]):
            return None
        if read.dim(source) == 2:
            return source
        node = read.root(source)
    if node.target is aten.unsqueeze.default and read.axis(node, node.args[1]) == 0 and read.dim(node) == 3:
        return node.args[0]
    return None


def _with_bias(read: Reader, node: Node, product: Product) -> Product | None:
    bias = node.args[1]
    if product.linear.bias is not None or not isinstance(bias, Node) or read.dtype(bias) != read.dtype(node):
        return None
    bias = read.root(bias)
    if product.axes == _BY_EXPERT:  # [E, 1, N]
        if bias.target is not aten.unsqueeze.default or read.axis(bias, bias.args[1]) != 1:
            return None
        bias = read.root(bias.args[0])
    if read.dim(bias) != 2 or not read.same_sizes(read.shape(bias)[1:], read.shape(node)[2:]):
        return None
    if not read.same_sizes(read.shape(bias)[:1], read.shape(product.linear.weight)[:1]):
        return None
    return product._replace(linear=ExpertLinear(product.linear.weight, product.linear.layout, bias))


# ---- their sum


def _weighted(read: Reader, node: Node) -> Value | str | None:
    """outputs * dense weights, with a unit axis for the features."""
    for weights_node, outputs in (node.args[:2], node.args[1::-1]):
        weights = read.value(weights_node)
        if isinstance(weights, DenseWeights) and weights.column and read.dim(outputs) == 3:
            bodies = _bodies(read, outputs, weights)
            return bodies if isinstance(bodies, str) else DenseTerm(bodies, weights)
    return None


def _bodies(read: Reader, outputs: Node, weights: DenseWeights) -> tuple[ExpertBody, ...] | str:
    """The experts whose outputs ``weights`` multiply, all at once or one after the other and stacked."""
    outputs = read.root(outputs)
    if outputs.target is aten.stack.default:
        parts, axis = read.arguments(outputs, None, 0)
        bodies = [read_body(read, part, product_of_matrix) for part in parts]
        axes = {0: _BY_EXPERT, 1: _BY_TOKEN}.get(read.axis(outputs, axis))
    else:
        bodies = [read_body(read, outputs, product_of_stack)]
        down = product_of_stack(read, outputs)
        axes = down.axes if down is not None else None
    problem = next((body for body in bodies if isinstance(body, str)), None)
    if problem is not None:
        return problem
    known = tuple(body for body in bodies if isinstance(body, ExpertBody))
    if any(len(set(body.rows)) != 1 for body in known):
        return f"the linear maps of the experts at {read.describe(outputs)} read different tokens"
    if axes != weights.axes:
        return f"{read.describe(outputs)} has its axes in another order than the weights of the experts"
    return known


def _sum_over_experts(read: Reader, node: Node) -> Value | str | None:
    term = read.value(node.args[0])
    if not isinstance(term, DenseTerm):
        return None
    _, axes, keepdim = read.arguments(node, None, None, False)[:3]
    if [read.axis(node.args[0], axis) for axis in axes or ()] != [term.weights.axes.index("expert")] or keepdim:
        return f"{read.describe(node)} must sum over the experts alone"
    if not read.holds(node, read.dtype(node.args[0])):
        return f"{read.describe(node)} rounds expert outputs to {read.dtype(node)} before they are summed"
    return DenseSum(term.bodies, term.weights)


def _weighted_sum(read: Reader, node: Node) -> Value | str | None:
    """einsum("ted,te->td", outputs, dense weights)."""
    equation, operands = node.args[:2]
    inputs, _, out = str(equation).replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(operands) != 2 or len(letters) != 2:
        return None
    for which in (0, 1):
        weights, outputs = read.value(operands[which]), operands[1 - which]
        if not isinstance(weights, DenseWeights) or weights.column or read.dim(outputs) != 3:
            continue
        of = dict(zip(weights.axes, letters[which], strict=True))
        of_outputs = letters[1 - which]
        wanted = of["token"] + of_outputs[-1]
        if out != wanted or set(of_outputs) != {*of.values(), of_outputs[-1]} or len(set(of_outputs)) != 3:
            return f"{read.describe(node)} must sum over the experts alone"
        axes: tuple[Axis, ...] = tuple(axis for letter in of_outputs[:2] for axis in of if of[axis] == letter)
        bodies = _bodies(read, outputs, DenseWeights(weights.weights, weights.ids, weights.num_experts, axes))
        return bodies if isinstance(bodies, str) else DenseSum(bodies, weights)
    return None


def _cast_dense(read: Reader, node: Node) -> Value | None:
    """A cast of outputs or their sum to the dtype of the tokens, or a wider one."""
    value: Any = read.value(node.args[0])
    if not isinstance(value, (DenseTerm, DenseSum)):
        return None
    tokens = read.dtype(value.bodies[0].rows[0])
    if isinstance(value, DenseSum) and read.dtype(node.args[0]) == tokens:
        return None
    return value if read.holds(node, tokens) else None


DENSE_EXPERTS = Spelling(
    name="dense_experts",
    part="all experts on all tokens",
    chain=(
        'einsum("td,efd->tef", x, gate_up), bmm, matmul, or a stack of single experts; gate; the second linear; '
        '* dense weights, sum over E, or einsum("ted,te->td")'
    ),
    rules=(
        Rule("outputs by dense weights", (aten.mul.Tensor,), _weighted),
        Rule("sum over experts", (aten.sum.dim_IntList,), _sum_over_experts),
        Rule("sum by dense weights", (aten.einsum.default,), _weighted_sum),
        Rule("cast of all outputs", CASTS, _cast_dense),
    ),
    source="hand-written layers, Mesh TensorFlow and its successors without a capacity",
)
