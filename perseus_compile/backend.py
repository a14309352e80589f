"""What does torch.compile call? The backend "perseus": chains the stages and calls the inner compiler."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from . import cuda_report, observe, verify
from .capture import CaptureError, aten_view
from .errors import OptionError, UnsupportedMoE
from .execution_state import ExecutionState, current_state, execution_states, strictest
from .facts import MoEMatch, MoEPlan, Refusal
from .inductor import register_decompositions
from .options import Options
from .passes.distributed import find_distributed_layers
from .passes.match_moe import find_moe_layers
from .passes.rewrite_moe import rewrite
from .plan import plan
from .prepared_layers import prepared_layers

log = logging.getLogger(__name__)

# Under these settings Dynamo also captures ops whose output shape depends on values, which hand-written loops need.
CAPTURE_SETTINGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def perseus(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The torch.compile backend: rewrites every MoE layer of ``gm`` and compiles the rest with the inner compiler.

    Args:
        gm: Dynamo's graph; it is edited in place.
        example_inputs: as torch.compile passes them.
        mode: torch.compile's ``mode``; the same as ``options={"mode": ...}``.
        options: see ``perseus_compile.Options``.

    Raises:
        OptionError: an unknown option or a value that it does not allow.
        UnsupportedMoE: a MoE layer was refused under ``on_unsupported="error"``.
        VerificationError: a rewrite changed numbers under ``verify=True``.
    """
    chosen = Options.from_mapping({**(options or {}), **({"mode": mode} if mode else {})})
    if chosen.dynamic is not None:
        raise OptionError(
            f"option 'dynamic' must be left out here, since a backend is called after that decision, got "
            f"{chosen.dynamic}; pass dynamic= to torch.compile itself, or use perseus_compile.compile"
        )
    inner = inner_compiler(chosen)
    report = observe.GraphReport()
    observe.trace_graph("perseus_before", gm)
    rewrite_graph(gm, chosen, report)
    observe.trace_graph("perseus_after", gm)
    if chosen.on_unsupported == "error" and report.refusals:
        observe.publish(report)
        raise UnsupportedMoE(_all_refusals(report.refusals))
    with report.timed("inner"):
        compiled = inner(gm, example_inputs)
    observe.publish(report)
    return compiled


def rewrite_graph(
    gm: GraphModule, options: Options, report: observe.GraphReport, start: ExecutionState | None = None
) -> None:
    """Runs capture, match, plan and rewrite on ``gm`` and on the graphs inside its higher-order operators.

    ``start``: the modes under which ``gm`` is called, where they are not those of this moment.
    """
    start = start or current_state()
    bodies = list(_bodies(gm, start))
    _rewrite_own_nodes(gm, options, report, start)
    # Last: bodies may write in place to what outer nodes hand on, which shows on the fake tensors of those.
    for child, modes in bodies:
        rewrite_graph(child, options, report, modes)


def _rewrite_own_nodes(gm: GraphModule, options: Options, report: observe.GraphReport, start: ExecutionState) -> None:
    report.layers.extend(prepared_layers(gm.graph))
    report.refusals.extend(find_distributed_layers(gm))
    try:
        with report.timed("capture"):
            view = aten_view(gm, start)
    except CaptureError as error:
        log.debug("graph %d is not viewed: %s", report.index, error)
        if error.is_failure:
            report.refusals.append(Refusal(layer="(graph)", stage="capture", reason=str(error), node=""))
        return
    with report.timed("match"):
        found = find_moe_layers(view)
    for result in found:
        with report.timed("plan"):
            decision = plan(result, verify=options.verify) if isinstance(result, MoEMatch) else result
        if isinstance(decision, Refusal):
            report.refusals.append(decision)
        else:
            assert isinstance(result, MoEMatch)
            _apply(gm, result, decision, options, report)
    if report.layers:
        gm.graph.lint()
        gm.recompile()


def _bodies(gm: GraphModule, start: ExecutionState) -> Iterator[tuple[GraphModule, ExecutionState]]:
    """The graphs that higher-order operators of ``gm`` call, such as those of activation checkpointing."""
    if not any(isinstance(child, GraphModule) for child in gm.children()):
        return
    states = execution_states(gm.graph, start)
    for name, child in gm.named_children():
        holders = [node for node in gm.graph.find_nodes(op="get_attr") if node.target == name]
        callers = [user for holder in holders for user in holder.users]
        if isinstance(child, GraphModule) and callers:
            yield child, strictest(states[caller] for caller in callers)


def _apply(gm: GraphModule, match: MoEMatch, decision: MoEPlan, options: Options, report: observe.GraphReport) -> None:
    if options.verify:
        with report.timed("verify"):
            verify.check_rewrite(gm, match, decision)
    with report.timed("rewrite"):
        part = observe.GraphPart(match.region_with_router, match.output)
        nodes_before, lines_before = len(gm.graph.nodes), part.lines()
        rewrite(gm.graph, match, decision, check_ids=options.debug)
    wants_rows = observe.is_collecting() and match.parallel is None
    rows = cuda_report.describe(match) if wants_rows else ()  # milliseconds, for those who read them
    report.layers.append(
        observe.LayerReport(
            layer=match.layer,
            spelling=match.spelling,
            op=decision.op,
            nodes_before=nodes_before,
            nodes_after=len(gm.graph.nodes),
            why=decision.why,
            lines_before=lines_before,
            lines_after=part.lines(),
            cuda=rows,
            checks=decision.checks,
        )
    )


def inner_compiler(options: Options) -> Callable[..., Any]:
    """The compiler that ``options.inner`` names.

    Raises:
        OptionError: no backend of that name is registered with torch.compile.
    """
    if options.inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = list_mode_options(options.mode) if options.mode else None
        register_decompositions()
        return functools.partial(compile_fx, config_patches=patches)
    registered = torch._dynamo.list_backends(exclude_tags=())
    if options.inner not in registered:
        raise OptionError(
            f"option 'inner' must name a backend registered with torch.compile ({', '.join(registered)}), "
            f"got {options.inner!r}; import the package that registers it first"
        )
    return torch._dynamo.lookup_backend(options.inner)


def compile(fn: Any, **options: Any) -> Any:
    """Compiles ``fn`` with the backend "perseus" and the Dynamo settings that hand-written MoE code needs.

    Data-dependent sizes and scalars are captured (``capture_scalar_outputs``, ``capture_dynamic_output_shape_ops``)
    around every call; a backend alone cannot set them. Code whose steps depend on such a number, such as a loop over
    ``ids.unique().tolist()``, is what torch cannot capture so; it is compiled without them, with a warning.

    Args:
        fn: a function, or a module; a module is compiled in place, so that its other methods (``generate``) use the
            compiled forward, and is returned.
        options: fields of ``perseus_compile.Options``.

    Raises:
        OptionError: an unknown option or a value that it does not allow.
        UnsupportedMoE: at a call, where torch meets such code after parts of the call have run.
    """
    chosen = Options.from_mapping(options)
    inner_compiler(chosen)
    backend_options = {name: value for name, value in options.items() if name != "dynamic"}
    settings: dict[str, Any] = {"backend": perseus, "dynamic": chosen.dynamic, "options": backend_options}
    if isinstance(fn, torch.nn.Module):
        fn.compile(**settings)
        assert fn._compiled_call_impl is not None, "compile() has just set it"
        fn._compiled_call_impl = _with_capture_settings(fn._compiled_call_impl)
        return fn
    return functools.wraps(fn)(_with_capture_settings(torch.compile(fn, **settings)))


def _with_capture_settings(compiled: Callable[..., Any]) -> Callable[..., Any]:
    settings = CAPTURE_SETTINGS

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal settings
        try:
            with torch._dynamo.config.patch(settings):
                return compiled(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            message = _MET_A_NUMBER.format(what=next(iter(str(error).splitlines()), ""))
            if _has_run_code(error):
                raise UnsupportedMoE(message + 'Or use torch.compile(model, backend="perseus")') from error
            log.warning(message + "This code is compiled without those settings; its graph breaks there.")
        settings = {}
        return compiled(*args, **kwargs)

    return call


_MET_A_NUMBER = (
    "under the Dynamo settings of perseus_compile.compile, which steps run must not depend on numbers in "
    "tensors, as it does in a loop over ids.unique().tolist(), but torch met one: {what}. "
    "A loop over range(num_experts) is captured and rewritten. "
)


def _has_run_code(error: BaseException) -> bool:
    """Whether parts of the user's code ran before ``error`` came from compiling a later part."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module == "torch._dynamo.convert_frame":
            return False
        if module.partition(".")[0] not in ("torch", __name__.partition(".")[0]):
            return True
    return True


def _all_refusals(refusals: Sequence[Refusal]) -> str:
    lines = [f"{refusal.layer}: {refusal.reason}" for refusal in refusals]
    return (
        f"option on_unsupported='error' wants every MoE layer rewritten, {len(lines)} kept their own code:\n  "
        + "\n  ".join(lines)
        + "\nchange the layers, or set on_unsupported='keep'"
    )
