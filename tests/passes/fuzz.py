"""Does the compiled code still compute what eager computes, after one change of a MoE layer's graph?

    python tests/passes/fuzz.py --mutants 10000 --seed 0
    python tests/passes/fuzz.py --source grouped --mutation argument --number 9

A mutant is a copy of the ATen graph of a layer (``mutant_sources.py``) with one edit of ``mutations.py``. It goes
through match, plan and rewrite as a graph from Dynamo does. Outputs, what became of the inputs, and gradients must
equal those of the mutant run by torch: wrong numbers and crashes are failures. Mutants for which torch itself has no
numbers are skipped: those that it cannot run, whose numbers differ from run to run or are decided by rounding, and
those whose expert ids are out of range.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mutant_sources import SOURCES, captured, text
from mutations import MUTATIONS, Edit, edits
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from perseus_compile.capture import AtenView
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.execution_state import ExecutionState
from perseus_compile.facts import MoEMatch, MoEPlan
from perseus_compile.passes.match_moe import find_moe_layers
from perseus_compile.passes.rewrite_moe import rewrite
from perseus_compile.plan import plan

# ---- one mutant


@dataclasses.dataclass(frozen=True)
class Mutant:
    source: str
    mutation: str
    number: int  # among the edits of the mutation

    def make(self) -> tuple[GraphModule, Edit]:
        """The changed graph, without fake values where the edit may have changed them."""
        original = captured(self.source)
        graph = Graph()
        graph.output(graph.graph_copy(original.graph, {}))
        edit = next(itertools.islice(edits(graph, self.mutation), self.number, None))
        edit.apply()
        return GraphModule(original, graph), edit

    def __str__(self) -> str:
        return f"{self.source}: {self.mutation} {self.number}: {self.make()[1].what}"


# What can become of a mutant. Those that are skipped have no numbers to compare with.
SKIPPED = ("does not run", "differs from run to run", "decided by rounding", "ids out of range", "0 times infinity")
COMPARED = ("refused", "experts", "experts_list", "moe", "FAILED")


def check(mutant: Mutant) -> tuple[str, str]:
    """What became of a mutant, one of ``SKIPPED`` or ``COMPARED``, and why."""
    gm, _ = mutant.make()
    first, *others = [_draw(gm.graph, *draw) for draw in DRAWS]
    try:
        expected = [(first, *_run_with_gradients(gm, first))]
        _set_fake_values(gm)
    except Exception as error:
        return "does not run", f"{type(error).__name__}: {error}"
    expected += [(draw, False, numbers) for draw in others if (numbers := _run_if_possible(gm, draw)) is not None]
    try:
        replaced, reasons = _rewrite(gm)
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error}\n{gm.graph}"
    outcome = min(plan.op for _, plan in replaced) if replaced else "refused"
    for draw, gradients, numbers in expected if replaced else ():
        try:
            wrong = difference(run(gm, draw, gradients=gradients), numbers)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            outcome = _excuse(mutant, draw, gradients, numbers) or "FAILED"
            if outcome == "FAILED":
                return outcome, f"{wrong}\n{gm.graph}"
    return outcome, "; ".join(reasons) or "no layer in sight"


def _rewrite(gm: GraphModule, *, check_ids: bool = False) -> tuple[list[tuple[MoEMatch, MoEPlan]], list[str]]:
    """Matches, plans and rewrites, as ``backend.rewrite_graph`` does: what was replaced, and the reasons given."""
    nodes = list(gm.graph.nodes)
    view = AtenView(
        graph=gm.graph,
        source=gm,
        origin={node: node for node in nodes},
        results={node: [node] for node in nodes if isinstance(node.meta.get("val"), Tensor)},
        state=dict.fromkeys(nodes, ExecutionState(grad=True, inference_depth=0, autocast=frozenset(), transform=False)),
        opaque=frozenset(),
    )
    replaced, reasons = [], []
    for result in find_moe_layers(view):
        decision = plan(result) if isinstance(result, MoEMatch) else result
        if isinstance(decision, MoEPlan):
            rewrite(gm.graph, result, decision, check_ids=check_ids)
            replaced.append((result, decision))
            reasons.append(decision.why)
        else:
            reasons.append(decision.reason)
    gm.graph.lint()
    return replaced, reasons


def _excuse(mutant: Mutant, draw: list[Any], gradients: bool, numbers: dict[str, Any]) -> str | None:
    """Which of ``SKIPPED`` a mutant is whose numbers changed, if it is one."""
    gm, _ = mutant.make()
    if any(_differs(gm, draw, gradients, numbers) for _ in range(2)):
        return "differs from run to run"
    # The op adds in another order than torch: casts to integers, remainders and ties can make much of little.
    if _differs(gm, _rounded_otherwise(draw), gradients, numbers):
        return "decided by rounding"
    _set_fake_values(gm)
    original = GraphModule(gm, Graph())
    original.graph.output(original.graph.graph_copy(gm.graph, copies := {}))
    replaced, _ = _rewrite(gm, check_ids=True)
    # Code that runs every expert on all tokens makes nan of a weight of 0 that was made of inf by a mask.
    dense = [match.weights_TK for match, _ in replaced if match.spelling in ("expert_loop", "dense_experts")]
    if not _are_finite(original, draw, [copies[weights] for weights in dense if weights is not None]):
        return "0 times infinity"
    try:
        run(gm, draw, gradients=False)
    except UnsupportedMoE:
        # Rows are sorted by any id, but only ids of experts are counted. Batched products wrap ids or raise.
        return "ids out of range" if any(match.spelling == "grouped_mm" for match, _ in replaced) else None
    return None


def _are_finite(gm: GraphModule, draw: list[Any], nodes: list[Node]) -> bool:
    gm.graph.output_node().update_arg(0, tuple(nodes))
    with torch.no_grad():
        return all(value.isfinite().all() for value in _Runner(gm).run(*draw))


def _differs(gm: GraphModule, draw: list[Any], gradients: bool, numbers: dict[str, Any]) -> bool:
    try:
        return difference(run(gm, draw, gradients=gradients), numbers) is not None
    except Exception:  # what was not initialised may not even run the next time
        return True


def _rounded_otherwise(draw: list[Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return value * (1 + 4 * torch.finfo(value.dtype).eps * noise)

    return [change(value) for value in draw]


def _run_with_gradients(gm: GraphModule, draw: list[Any]) -> tuple[bool, dict[str, Any]]:
    """Code that writes in place to a parameter, or to what autograd saved, has no gradients."""
    try:
        return True, run(gm, draw, gradients=True)
    except RuntimeError:
        return False, run(gm, draw, gradients=False)


def _run_if_possible(gm: GraphModule, draw: list[Any]) -> dict[str, Any] | None:
    try:
        return run(gm, draw, gradients=False)
    except Exception:  # sizes that fit only in the other draws
        return None


# Token count, factor of the spread, and whether rows with inf and nan are among them. T is K and E of most sources.
DRAWS = ((5, 1.0, False), (2, 30.0, False), (4, 1.0, True))


def _draw(graph: Graph, num_tokens: int, spread: float, extremes: bool) -> list[Any]:
    """Random values for the placeholders of ``graph``; the same for every mutant of a source."""
    generator = torch.Generator().manual_seed(num_tokens)
    values: list[Any] = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            values.append(num_tokens if isinstance(value, torch.SymInt) else value)
            continue
        is_token = any(isinstance(size, torch.SymInt) for size in value.shape)
        shape = [size if isinstance(size, int) else num_tokens for size in value.shape]
        if not value.is_floating_point():
            values.append(torch.randint(4, shape, generator=generator, dtype=value.dtype))
            continue
        drawn = torch.randn(shape, generator=generator) * (spread if is_token else _scale(shape))
        if is_token and extremes:
            rows = drawn.view(-1, shape[-1])
            rows[0, 0], rows[1, -1], rows[2, 1] = float("inf"), float("nan"), -1e4
        values.append(drawn.to(value.dtype))
    return values


def _scale(shape: Sequence[int]) -> float:
    return shape[-1] ** -0.5 if len(shape) > 2 else 1.0


def _set_fake_values(gm: GraphModule) -> None:
    """What Dynamo would have noted on the nodes that are not as in the source, and on those that follow from them."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    fake_mode = next(value.fake_mode for value in values if isinstance(value, Tensor))
    shape_env = fake_mode.shape_env
    stale: set[Node] = set()
    with fake_mode, torch.no_grad(), shape_env.ignore_fresh_unbacked_symbols(), shape_env.suppress_guards():
        for node in gm.graph.nodes:
            changed = node.meta.get("source text") != text(node) or not stale.isdisjoint(node.all_input_nodes)
            if node.op == "call_function" and changed:
                stale.add(node)
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                node.meta["val"] = node.meta["example_value"] = node.target(*args, **kwargs)


def run(gm: GraphModule, draw: list[Any], *, gradients: bool) -> dict[str, Any]:
    """Outputs, what became of the inputs, and gradients of the inputs, by name."""
    leaves = [value.clone() if isinstance(value, Tensor) else value for value in draw]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf.requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        # The tokens come from the layer before, and may be written to; parameters are leaves.
        given = [leaf * 1 if is_tokens else leaf for leaf, is_tokens in zip(leaves, _are_tokens(gm), strict=True)]
        outputs = _Runner(gm).run(*given)
    named = {f"output {i}": output for i, output in enumerate(outputs)}
    named |= {f"input {i} afterwards": value for i, value in enumerate(given)}
    differentiable = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if differentiable:
        # A cosine gives every element of the output its own weight.
        sum((o.float() * torch.arange(o.numel()).cos().view_as(o)).sum() for o in differentiable).backward()
        named |= {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in named.items()}


class _Runner(Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.transformers.grouped_mm_fallback.default:
            # Its backward reads the offsets again, and does not notice what was written to them meanwhile.
            args = (*args[:2], args[2].clone())
        return super().call_function(target, args, kwargs)


def _are_tokens(gm: GraphModule) -> list[bool]:
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [
        isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape) for value in values
    ]


def difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first value that is not what it should be, or None."""
    for name in sorted({*actual, *expected}):
        is_gradient = name.startswith("gradient")
        wrong = _difference(actual.get(name), expected.get(name), is_gradient=is_gradient)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _difference(actual: Any, expected: Any, *, is_gradient: bool) -> str | None:
    """Finite numbers are compared at the size of their row, since sums of large numbers may be small."""
    tolerance = _GRADIENT_TOLERANCE if is_gradient else _TOLERANCE
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return None if actual is expected or actual == expected else f"{actual} for {expected}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{list(actual.shape)} {actual.dtype} for {list(expected.shape)} {expected.dtype}"
    if not expected.is_floating_point():
        wrong = actual != expected
    else:
        finite = expected.isfinite() & actual.isfinite()
        size = expected.where(finite, 0).abs()
        size = size.amax(dim=-1, keepdim=True) if size.dim() and size.numel() else size
        near = (actual - expected).abs() <= tolerance[expected.dtype] * (size + 0.1)
        # The sums of a gradient have no order of their own: inf in one is nan in another.
        same = ~actual.isfinite() if is_gradient else (actual == expected) | (actual.isnan() & expected.isnan())
        wrong = ~torch.where(expected.isfinite(), finite & near, same)
    if not wrong.any():
        return None
    first = tuple(int(i) for i in wrong.nonzero()[0])
    return f"{int(wrong.sum())} of {wrong.numel()}, first {actual[first]} for {expected[first]} at {first}"


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 4e-2}
# Routers compute in float32, and add their gradients in another order.
_GRADIENT_TOLERANCE = {**_TOLERANCE, torch.float64: 2e-5}


# ---- many mutants


@dataclasses.dataclass
class Result:
    """How many mutants ended how, and each failure."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: dict[Mutant, str] = dataclasses.field(default_factory=dict)

    @property
    def num_compared(self) -> int:
        return sum(self.counts[outcome] for outcome in COMPARED)

    def __str__(self) -> str:
        compared, skipped = (
            ", ".join(f"{self.counts[name]} {name}" for name in names) for names in (COMPARED, SKIPPED)
        )
        return f"{self.num_compared} mutants compared: {compared}; skipped: {skipped}"


def mutants(sources: Sequence[str], mutations: Sequence[str], seed: int) -> Iterator[Mutant]:
    """Different mutants in random order: each source is as likely as any other, and so is each mutation."""
    order = random.Random(seed)
    left: dict[tuple[str, str], list[int]] = {}
    for source in sources:
        for mutation in mutations:
            num_edits = sum(1 for _ in edits(captured(source).graph, mutation))
            left[source, mutation] = order.sample(range(num_edits), num_edits)
    while places := [place for place, numbers in left.items() if numbers]:
        source, mutation = order.choice(places)
        yield Mutant(source, mutation, left[source, mutation].pop())


def fuzz(
    num_mutants: int,
    seed: int,
    *,
    sources: Sequence[str] = tuple(SOURCES),
    mutations: Sequence[str] = tuple(MUTATIONS),
    report: Callable[[Mutant, str, str], None] | None = None,
) -> Result:
    """Checks mutants until ``num_mutants`` were compared, or none is left; ``report`` gets each and its outcome."""
    result = Result()
    with warnings.catch_warnings(), _one_thread():
        warnings.simplefilter("ignore")
        for mutant in mutants(sources, mutations, seed):
            outcome, why = check(mutant)
            result.counts[outcome] += 1
            if outcome == "FAILED":
                result.failures[mutant] = why
            if report is not None:
                report(mutant, outcome, why)
            if result.num_compared >= num_mutants:
                break
    return result


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are so small that a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000, help="how many mutants to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", choices=SOURCES, nargs="*", default=list(SOURCES), help="mutants of these alone")
    parser.add_argument("--mutation", choices=MUTATIONS, nargs="*", default=list(MUTATIONS), help="these changes alone")
    parser.add_argument("--verbose", action="store_true", help="a line for every mutant, not only for failures")
    parser.add_argument("--number", type=int, help="the one mutant that a failure names, of one source and mutation")
    args = parser.parse_args()

    def report(mutant: Mutant, outcome: str, why: str) -> None:
        if args.verbose or outcome == "FAILED":
            print(f"{outcome}: {mutant}\n    {why}", flush=True)

    if args.number is not None:
        mutant = Mutant(args.source[0], args.mutation[0], args.number)
        outcome, why = check(mutant)
        print(f"{outcome}: {mutant}\n    {why}")
        return 1 if outcome == "FAILED" else 0
    start = time.perf_counter()
    result = fuzz(args.mutants, args.seed, sources=args.source, mutations=args.mutation, report=report)
    print(f"seed {args.seed}: {result}, {time.perf_counter() - start:.0f} s")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
