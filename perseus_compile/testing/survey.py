"""What becomes of the MoE layers of each family of transformers? Builds it tiny, compiles it, compares the numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from perseus_compile import observe
from perseus_compile.backend import CAPTURE_SETTINGS, perseus
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.explain import NOT_FOUND
from perseus_compile.graph_breaks import fresh_dynamo, record_graph_breaks
from perseus_compile.prepare import prepare
from perseus_compile.testing.families import Family, experts_of, inputs_of, tiny_model

_NUM_TOKENS = 7  # of each of two sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyReport:
    """One family: how many of its MoE layers ran as perseus ops, and how far the numbers moved.

    Attributes:
        name: the family's.
        decorated: whether transformers lets its experts run in several ways.
        num_layers: how many times experts run in one call of the model; 0 where no model could be built.
        ops: the perseus op of each layer that was rewritten.
        reasons: for experts alone, why the router is not part of the op; for other layers, why they keep their code.
        output_error, gradient_error: the L2 norm of the difference from eager, relative to that of eager; of all
            gradients together, 0 where none were asked for.
    """

    name: str
    decorated: bool
    num_layers: int = 0
    ops: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    output_error: float = 0.0
    gradient_error: float = 0.0

    @property
    def is_rewritten(self) -> bool:
        """Whether every MoE layer was."""
        return 0 < self.num_layers == len(self.ops)


def survey(
    family: Family,
    *,
    implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.float32,
    train: bool = False,
) -> FamilyReport:
    """Compiles a tiny model of ``family`` with an uncompiled graph after the rewrite, and compares it with eager.

    Families that are not decorated go through ``prepare``, and are captured as ``perseus_compile.compile`` does.

    Args:
        implementation: how decorated experts run.
        train: in training mode, with gradients.
    """
    try:
        model = tiny_model(family, dtype=dtype)
    except LookupError as error:
        return FamilyReport(name=family.name, decorated=family.decorated, reasons=(str(error),))
    if family.decorated:
        model.set_experts_implementation(implementation)
    model.train(train)
    inputs = inputs_of(model, num_tokens=_NUM_TOKENS)
    with _count_calls(experts_of(model)) as calls:
        expected = _run(model, inputs, train)
    num_layers = len(calls)
    compiled = copy.deepcopy(model)
    if not family.decorated:
        with contextlib.suppress(UnsupportedMoE):  # what prepare() does not know keeps its code, and is reported so
            prepare(compiled)
    compiled.compile(backend=perseus, options={"inner": "eager"})
    settings = {} if family.decorated else CAPTURE_SETTINGS
    with (
        torch._dynamo.config.patch(settings),
        fresh_dynamo(),
        record_graph_breaks() as breaks,
        observe.collect() as graphs,
    ):
        actual = _run(compiled, inputs, train)
        graph_breaks = [one.reason for one in breaks()]
    layers = [layer for graph in graphs for layer in graph.layers]
    reasons = [layer.why for layer in layers if layer.op != "moe"]
    reasons += [refusal.reason for graph in graphs for refusal in graph.refusals]
    if len(layers) < num_layers and not reasons:
        reasons = [f"graph break: {reason.splitlines()[0]}" for reason in graph_breaks] or [NOT_FOUND]
    return FamilyReport(
        name=family.name,
        decorated=family.decorated,
        num_layers=num_layers,
        ops=tuple(layer.op for layer in layers),
        reasons=tuple(dict.fromkeys(map(_without_names, reasons))),
        output_error=_relative_error(actual[:1], expected[:1]),
        gradient_error=_relative_error(actual[1:], expected[1:]),
    )


def as_markdown(reports: Iterable[FamilyReport]) -> str:
    """A table with one row per family."""
    lines = ["| family | rewritten | op | why not all of it |", "| --- | --- | --- | --- |"]
    for report in reports:
        op = ", ".join(f"`{op}`" for op in dict.fromkeys(report.ops)) or "-"
        reasons = "; ".join(reason.replace("|", "\\|") for reason in report.reasons) or "-"
        lines.append(f"| {report.name} | {len(report.ops)} of {report.num_layers} | {op} | {reasons} |")
    return "\n".join(lines) + "\n"


def _run(model: nn.Module, inputs: dict[str, object], train: bool) -> list[Tensor]:
    """The first output, then the gradients of all parameters that have one."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(train):
        torch.manual_seed(0)
        output = model(**inputs)[0]
        if not train:
            return [output]
        # A cosine gives every element of the output its own weight.
        (output.float() * torch.arange(output.numel()).cos().view_as(output)).sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach(), *grads]


@contextlib.contextmanager
def _count_calls(modules: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Collects ``modules`` in the order in which they are called."""
    calls: list[nn.Module] = []
    hooks = [module.register_forward_hook(lambda called, *_: calls.append(called)) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    assert [one.shape for one in actual] == [one.shape for one in expected], "the same outputs and gradients exist"
    if not expected:
        return 0.0
    difference = torch.stack([(a.double() - e.double()).norm() for a, e in zip(actual, expected, strict=True)]).norm()
    return float(difference / torch.stack([e.double().norm() for e in expected]).norm())


def _without_names(reason: str) -> str:
    """``reason`` without the names of nodes, which differ between releases of torch and layers of a model."""
    return re.sub(r" \(\w+\)", "", reason.removeprefix("experts alone: "))
