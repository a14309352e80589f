"""The command line: what it prints, what it refuses, and how it exits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from perseus_compile import cli, doctor
from perseus_compile.cli import models
from perseus_compile.cli.models import DType, Width, random_model
from perseus_compile.doctor import Finding
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.explain import PREPARE
from perseus_compile.moe_modules import find_moe_modules
from perseus_compile.testing import families
from perseus_compile.testing.models import config_for

BORDER = "\N{BOX DRAWINGS LIGHT VERTICAL}"  # between the columns of a table


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def _one_line(result: Result) -> str:
    """The output without the line breaks and borders that depend on the width of the terminal."""
    return " ".join(result.output.replace(BORDER, " ").split())


def test_explain_prints_a_row_per_layer() -> None:
    result = _run("explain", "qwen3_moe", "--layers", "3")
    assert result.exit_code == 0, result.output
    assert result.output.count(f"rewritten {BORDER}") == 3
    assert "3 rewritten, 0 refused, 0 not found" in result.output


def test_explain_prints_a_row_per_family(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tuple(family for family in families.find_families() if family.name in ("mixtral", "doge"))
    monkeypatch.setattr(families, "find_families", lambda: chosen)
    result = _run("explain", "--all")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[:2] for row in rows if "---" not in row] == [["| doge", "0 of 2"], ["| mixtral", "2 of 2"]]


def test_explain_needs_a_name_or_all() -> None:
    result = _run("explain")
    assert result.exit_code == 2
    assert "a NAME_OR_FOLDER must be given, or --all, got neither" in _one_line(result)


def test_a_name_beside_all_is_a_mistake() -> None:
    result = _run("explain", "qwen3_moe", "--all")
    assert result.exit_code == 2
    assert "a NAME_OR_FOLDER must be given, or --all, got both" in _one_line(result)


def test_an_implementation_that_the_model_does_not_have() -> None:
    result = _run("explain", "qwen3_moe", "--implementation", "foo")
    assert result.exit_code == 2
    assert "--implementation must be one that qwen3_moe has" in _one_line(result)


def test_a_model_whose_experts_have_one_implementation_is_explained() -> None:
    result = _run("explain", "llama4_text", "--layers", "1")
    assert result.exit_code == 0, result.output
    assert "modules that own experts: 1" in result.stdout


def test_explain_as_json_with_a_break() -> None:
    result = _run("explain", "qwen3_moe", "--implementation", "eager", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["layers"] == []
    assert {row["advice"] for row in report["graph_breaks"] if row["moe_layers"]} == {PREPARE}


def test_explain_reads_a_folder_and_keeps_its_meaning(tmp_path: Path) -> None:
    config = config_for("qwen3_moe", num_layers=4, norm_topk_prob=True, decoder_sparse_step=2)
    config.save_pretrained(tmp_path)
    result = _run("explain", str(tmp_path), "--json", "--layers", "4", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["layers"]
    assert [row["layer"] for row in rows] == ["model.layers.1.mlp.experts", "model.layers.3.mlp.experts"]
    unfolded = re.sub(r"\n[+-] +", " ", rows[0]["graph_diff"])
    assert "renormalize: True" in unfolded


def test_diff_shows_one_layer() -> None:
    result = _run("diff", "deepseek_v3")
    assert result.exit_code == 0, result.output
    assert result.output.count("torch.ops.perseus.moe.default") == 1


def test_diff_of_a_refused_layer_fails_with_the_report() -> None:
    result = _run("diff", "qwen3_moe", "--implementation", "eager")
    assert result.exit_code == 1
    assert "perseus_compile.prepare(model)" in _one_line(result)


@pytest.mark.parametrize("name", ["qwen3_mo", "no/such/folder"])
def test_unknown_name_lists_what_is_allowed(name: str) -> None:
    result = _run("explain", name)
    assert result.exit_code == 2
    assert "must be a Hugging Face model_type such as qwen3_moe, or a folder with a config.json" in _one_line(result)
    assert ("did you mean" in _one_line(result)) == (name == "qwen3_mo")


def test_model_that_cannot_be_built_says_why() -> None:
    with pytest.raises(UnsupportedMoE, match="as a causal LM of width reduced"):
        random_model("clip", num_layers=1, width=Width.reduced, dtype=DType.float32, implementation=None)


def test_model_too_large_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_available_bytes", lambda: 10**9)
    result = _run("explain", "mixtral", "--width", "full")
    assert result.exit_code == 2
    assert "this machine has 1.0 GB free; use --layers 1" in _one_line(result)


def test_full_width_keeps_sizes_and_has_a_moe_layer() -> None:
    """DeepSeek-V3 starts with three dense layers; two layers of it must still hold a MoE layer."""
    config = config_for("deepseek_v3", num_layers=2)
    assert (config.hidden_size, config.n_routed_experts, config.num_hidden_layers) == (7168, 256, 2)
    small = random_model("deepseek_v3", num_layers=2, width=Width.reduced, dtype=DType.float32, implementation=None)
    assert len(find_moe_modules(small)) == 1


def test_errors_of_the_library_end_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["perseus", "explain", "clip"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "error:" in error
    assert "Traceback" not in error


def test_doctor_names_what_each_missing_piece_costs() -> None:
    findings = {finding.name: finding for finding in doctor.diagnose()}
    assert findings["torch"].found and findings['backend "perseus"'].found and findings["transformers"].found
    for finding in findings.values():
        assert finding.found == (finding.cost == ""), finding
    result = _run("doctor", "--json")
    assert [row["name"] for row in json.loads(result.stdout)] == list(findings)


@pytest.mark.parametrize(("required", "exit_code"), [(True, 1), (False, 0)])
def test_doctor_fails_only_where_a_required_piece_is_missing(
    monkeypatch: pytest.MonkeyPatch, required: bool, exit_code: int
) -> None:
    missing = Finding(name="a piece", found=False, required=required, detail="-", cost="all of it")
    monkeypatch.setattr("perseus_compile.cli.inspect.diagnose", lambda: [missing])
    result = _run("doctor")
    assert result.exit_code == exit_code
    assert "all of it" in result.output
