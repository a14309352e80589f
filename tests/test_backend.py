"""The backend as torch.compile sees it: inner compilers, refusals as errors, reports, logs, Dynamo settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spellings import BatchedMM, GroupedMM, changed
from torch import Tensor, nn
from torch._dynamo.utils import counters

import perseus_compile
from perseus_compile import inductor, observe
from perseus_compile.errors import UnsupportedMoE


def tokens(count: int = 5) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def no_layer_at_all(x: Tensor) -> Tensor:
    return (x @ x.T).softmax(-1) @ x


def refused_layer() -> nn.Module:
    def gate(layer: nn.Module, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    return changed(GroupedMM, gate=gate)()


class RecordingCompiler:
    """Stands for a compiler that a package registers with torch.compile, as torch-tensorrt does."""

    def __init__(self) -> None:
        self.targets: list[Any] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        self.targets.extend(node.target for node in gm.graph.nodes)
        return gm.forward


def test_any_registered_backend_can_be_the_inner_compiler() -> None:
    compiler = RecordingCompiler()
    torch._dynamo.register_backend(compiler, name="recording_compiler")
    layer = BatchedMM()
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "recording_compiler"})
    torch.testing.assert_close(compiled(tokens()), layer(tokens()))
    assert compiler.targets.count(torch.ops.perseus.moe.default) == 1
    assert torch.bmm not in compiler.targets


def test_a_graph_without_moe_reaches_the_inner_compiler_unchanged() -> None:
    def plain(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        plain.code = gm.code
        return gm.forward

    torch._dynamo.register_backend(plain, name="plain_compiler")
    torch.compile(no_layer_at_all, backend="plain_compiler")(tokens())
    alone = plain.code
    torch._dynamo.reset()
    torch.compile(no_layer_at_all, backend=perseus_compile.perseus, options={"inner": "plain_compiler"})(tokens())
    assert plain.code == alone


def test_on_unsupported_error_raises_every_reason() -> None:
    compiled = torch.compile(
        refused_layer(), backend=perseus_compile.perseus, options={"inner": "eager", "on_unsupported": "error"}
    )
    with pytest.raises(Exception, match="got mul\\(tanh\\(first\\), second\\)") as error:
        compiled(tokens())
    assert "option on_unsupported='error' wants every MoE layer rewritten, 1 kept their own code" in str(error.value)


def test_on_unsupported_keep_keeps_the_numbers_and_counts_the_refusal() -> None:
    counters["perseus"].clear()
    layer = refused_layer()
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "eager"})
    torch.testing.assert_close(compiled(tokens()), layer(tokens()))
    assert dict(counters["perseus"]) == {"graphs": 1, "rewrites": 0, "refusals": 1}


def test_compile_of_a_module_is_in_place_and_of_a_function_is_not() -> None:
    layer = BatchedMM()
    expected = layer(tokens())
    with observe.collect() as reports:
        assert perseus_compile.compile(layer, inner="eager") is layer
        torch.testing.assert_close(layer(tokens()), expected)
    assert [len(report.layers) for report in reports] == [1]

    def call(x: Tensor) -> Tensor:
        return x.sin()

    compiled = perseus_compile.compile(call, inner="eager")
    assert compiled is not call and compiled.__name__ == "call"
    torch.testing.assert_close(compiled(tokens()), call(tokens()))


def test_compile_captures_what_a_backend_alone_cannot() -> None:
    """A loop over all experts with data-dependent sizes is one graph under compile(), and several without."""

    def loop(x: Tensor) -> Tensor:
        ids = x.argmax(dim=-1)
        out = torch.zeros_like(x)
        for expert in range(3):
            rows = torch.where(ids == expert)[0]
            out = out.index_add(0, rows, x[rows] * (expert + 1))
        return out

    with observe.collect() as reports:
        torch.testing.assert_close(perseus_compile.compile(loop, inner="eager")(tokens()), loop(tokens()))
    assert len(reports) == 1
    torch._dynamo.reset()
    with observe.collect() as reports:
        torch.compile(loop, backend=perseus_compile.perseus, options={"inner": "eager"})(tokens())
    assert len(reports) != 1


class HitLoop(nn.Module):
    """A loop over the experts that some token chose, which torch cannot capture."""

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(dim=-1)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows = torch.where(ids == expert)[0]
            out = out.index_add(0, rows, x[rows] * (expert + 1))
        return out


def test_compile_of_steps_that_depend_on_values(caplog: pytest.LogCaptureFixture) -> None:
    """Code that torch cannot capture under the settings of compile() runs as under torch.compile, with one warning."""
    compiled = perseus_compile.compile(HitLoop(), inner="eager")
    for num_tokens in (4, 5):
        torch.testing.assert_close(compiled(tokens(num_tokens)), HitLoop()(tokens(num_tokens)))
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "unique().tolist()" in warning and "range(num_experts)" in warning and "graph breaks there" in warning


def test_compile_runs_nothing_twice() -> None:
    """Where such code comes after steps that ran, they must not run again."""
    calls: list[int] = []

    class Counted(HitLoop):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(UnsupportedMoE, match=r'torch.compile\(model, backend="perseus"\)'):
        perseus_compile.compile(Counted(), inner="eager")(tokens())
    assert len(calls) == 1


def test_reports_and_logs_name_the_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), BatchedMM(), refused_layer())
    with caplog.at_level(logging.DEBUG, logger="perseus_compile"), observe.collect() as reports:
        torch.compile(model, backend=perseus_compile.perseus, options={"inner": "eager"})(tokens())
    (report,) = reports
    assert [(layer.layer, layer.op, layer.spelling) for layer in report.layers] == [("1", "moe", "batched_mm")]
    assert [(refusal.layer, refusal.stage) for refusal in report.refusals] == [("2", "match")]
    assert {"capture", "match", "plan", "rewrite", "inner"} == set(report.seconds)
    text = caplog.text
    assert "1: rewritten to perseus::moe (router and experts are one node); nodes: " in text
    assert "2: not rewritten (match): the gate between the two expert linears must be one of" in text
    assert "+%moe_default = call_function[torch.ops.perseus.moe.default]" in text


def test_layers_inside_activation_checkpointing_are_rewritten() -> None:
    layer = BatchedMM()

    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sin()

    x = tokens().requires_grad_()
    with observe.collect() as reports:
        compiled = torch.compile(checkpointed, backend=perseus_compile.perseus, options={"inner": "aot_eager"})
        (actual,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(checkpointed(x).sum(), x)
    torch.testing.assert_close(actual, expected)
    assert [layer.op for report in reports for layer in report.layers] == ["moe"]


def test_inductor_calls_the_whole_layer_where_it_does_not_take_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where one op is one launch."""
    from torch._inductor.utils import run_and_get_code

    layer = BatchedMM()
    expected = layer(tokens())
    for devices, op in (("cpu",), "perseus.experts.default"), ((), "perseus.moe.default"):
        torch._dynamo.reset()
        monkeypatch.setattr(inductor, "_DECOMPOSED_DEVICES", devices)
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            actual, (code,) = run_and_get_code(torch.compile(layer, backend=perseus_compile.perseus), tokens())
        torch.testing.assert_close(actual, expected)
        assert code.count(f"torch.ops.{op}(") == 1


@pytest.mark.parametrize("mode", ("reduce-overhead", "max-autotune-no-cudagraphs"))
def test_modes_of_inductor_reach_inductor(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, list_mode_options

    seen: list[Any] = []

    def fake_compile_fx(gm: torch.fx.GraphModule, inputs: list[Tensor], config_patches: Any) -> Callable[..., Any]:
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", fake_compile_fx)
    torch.compile(torch.sin, backend=perseus_compile.perseus, mode=mode)(tokens())
    assert seen == [list_mode_options(mode)]
