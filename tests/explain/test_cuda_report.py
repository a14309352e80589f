"""What does explain() say about a layer on a GPU? Its tensors are fake, and the numbers of the GPU are an H200's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from measured_rows import H200
from torch.fx import GraphModule

from perseus_compile import cuda_plan, cuda_report, fused_experts, tuned
from perseus_compile.capture import aten_view
from perseus_compile.cuda_cost import PLAIN, Candidate
from perseus_compile.explain import ExplainedLayer, Report, explain
from perseus_compile.facts import MoEMatch
from perseus_compile.passes.match_moe import find_moe_layers
from perseus_compile.testing.models import random_tokens, tiny_causal_lm


def _match(**sizes: Any) -> MoEMatch:
    """The first layer of a small Qwen3-MoE model, D = 64, F = 32, E = 8, K = 2, in bfloat16."""
    model = tiny_causal_lm("qwen3_moe", num_layers=1, dtype=torch.bfloat16, **sizes)
    found: list[object] = []

    def only_match(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(find_moe_layers(aten_view(gm)))
        return gm.forward  # type: ignore[no-any-return]

    with torch.no_grad():
        torch.compile(model, backend=only_match)(random_tokens(model, (1, 4)), use_cache=False)
    (match,) = found
    assert isinstance(match, MoEMatch)
    return match


def _move_to_gpu(match: MoEMatch) -> None:
    nodes = (match.x_TD, match.ids_TK, match.weights_TK, match.gate_up, match.down)
    for node in nodes:
        value = node.meta["example_value"]
        with value.fake_mode:
            moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        node.meta["example_value"] = moved


@pytest.fixture
def tuned_entries(monkeypatch: pytest.MonkeyPatch) -> dict[tuned.Key, tuned.Timed]:
    """The machine has an H200; the dict holds what was tuned on it."""
    entries: dict[tuned.Key, tuned.Timed] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fused_experts, "_is_hopper", lambda index: True)
    monkeypatch.setattr(cuda_plan, "gpu_numbers", lambda index: H200)
    monkeypatch.setattr(tuned, "key_of", lambda shape, index: tuple(dataclasses.asdict(shape).items()))
    monkeypatch.setattr(tuned, "lookup", entries.get)
    return entries


def test_a_row_per_bucket(tuned_entries: dict[tuned.Key, tuned.Timed]) -> None:
    match = _match()
    _move_to_gpu(match)
    rows = cuda_report.describe(match)
    assert [row.num_tokens for row in rows] == list(cuda_report.TOKENS)
    assert {(row.path, row.source) for row in rows} == {("fused", "model")}
    assert rows[0].kernel == "perseus_moe_fwd few8 out_in silu"
    assert [row.predicted_ms for row in rows] == sorted(row.predicted_ms for row in rows)
    for row in rows:
        assert row.workspace_bytes and row.workspace_bound_bytes
        assert row.workspace_bytes <= row.workspace_bound_bytes
    # one token: 2 rows of hidden and of outputs and 2 row numbers, 4 blocks and their flags, 64 counts per expert,
    # then logits, ids and weights of the router
    assert rows[0].workspace_bytes == 256 + 256 + 256 + 256 + 256 + 64 * 8 * 4 + 3 * 256
    assert rows[0].router == "in the launch"
    assert rows[1].router == "apart: launches of its own are faster for a router of 16 tokens and 8 experts"


def test_a_tuned_bucket_says_so(tuned_entries: dict[tuned.Key, tuned.Timed]) -> None:
    match = _match()
    _move_to_gpu(match)
    x, ids, gate_up, down = (
        node.meta["example_value"] for node in (match.x_TD, match.ids_TK, match.gate_up, match.down)
    )
    shape = cuda_plan.call_shape(x, ids, gate_up, None, down, match.spec)
    key = tuned.key_of(dataclasses.replace(shape, num_tokens=128), 0)
    few64 = Candidate(path="fused", tiles="few64", column_groups=1)
    tuned_entries[key] = ((few64, 0.02), (PLAIN, 0.01))
    row = {row.num_tokens: row for row in cuda_report.describe(match)}[128]
    assert (row.path, row.source, row.predicted_ms, row.kernel, row.workspace_bytes) == (
        "plain",
        "tuned",
        0.01,
        None,
        None,
    )
    assert row.reason == "the fastest of 2 candidates measured on this machine"


def test_plain_path_has_its_reason(
    tuned_entries: dict[tuned.Key, tuned.Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    match = _match()
    _move_to_gpu(match)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(fused_experts, "_is_hopper", lambda index: False)
    rows = cuda_report.describe(match)
    assert {row.path for row in rows} == {"plain"}
    assert rows[0].reason == "the fused kernel needs compute capability 9.0, got (10, 0)"


def test_no_rows_on_a_cpu() -> None:
    assert cuda_report.describe(_match()) == ()
    model = tiny_causal_lm("qwen3_moe", num_layers=1)
    with torch.no_grad():
        report = explain(model, random_tokens(model, (1, 4)))
    assert report.layers[0].cuda == ()
    assert "on the GPU" not in str(report)


def test_table_has_layers_that_run_alike_once(tuned_entries: dict[tuned.Key, tuned.Timed]) -> None:
    match = _match()
    _move_to_gpu(match)
    rows = cuda_report.describe(match)
    layers = tuple(
        ExplainedLayer(graph=0, layer=f"layers.{index}.mlp", status="rewritten", reason="", cuda=rows)
        for index in range(3)
    )
    report = Report(layers=layers, graph_breaks=(), num_graphs=1, num_moe_modules=3)
    text = str(report)
    table = text[text.index("On the GPU") :]
    assert table.startswith("On the GPU, milliseconds without the router: layers.0.mlp, layers.1.mlp and 1 more")
    assert table.count("perseus_moe_fwd") == len(cuda_report.TOKENS)
    assert f"{rows[-1].predicted_ms:.3g} (model)" in table
    assert report.to_dict()["layers"][0]["cuda"][0]["kernel"] == rows[0].kernel
    assert "perseus_moe_fwd" in report.to_json()


@pytest.mark.gpu
def test_explain_of_a_model_on_a_gpu() -> None:
    model = tiny_causal_lm("qwen3_moe", num_layers=2, dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        report = explain(model, random_tokens(model, (1, 4)).cuda())
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    for layer in report.layers:
        assert layer.status == "rewritten", layer.reason
        assert {row.path for row in layer.cuda} == {"fused" if is_hopper else "plain"}
        assert all(row.predicted_ms > 0 and row.reason for row in layer.cuda)
    assert "On the GPU" in str(report)
    if is_hopper:
        in_launch = [row.num_tokens for row in report.layers[0].cuda if row.router == "in the launch"]
        assert in_launch == [1]
