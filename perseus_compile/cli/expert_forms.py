"""Which experts does a command work on: those of a Hugging Face model, or numbers from the command line?

A model of that type with small sizes is matched as the backend would match it, which gives the form of the experts; the
sizes are those of the full model, whose parameters are counted on the meta device.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import torch
import typer
from torch.fx import GraphModule

from perseus_compile.capture import aten_view
from perseus_compile.cli.models import DType, Width, meta_model, random_model
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import Activation, ExpertsSpec, GateLayout, MoEMatch, WeightLayout
from perseus_compile.lower import ACTIVATION_PARAMS
from perseus_compile.moe_modules import find_moe_modules
from perseus_compile.passes.match_moe import find_moe_layers
from perseus_compile.testing.models import random_tokens

_ACTIVATION_PARAM = 7.0  # no time depends on it

ModelType = Annotated[str | None, typer.Option(help="a Hugging Face model_type, or a folder with a config.json")]
Hidden = Annotated[int | None, typer.Option(min=8, help="model width D, without --model-type")]
ExpertWidth = Annotated[int | None, typer.Option(min=8, help="expert width F")]
Experts = Annotated[int | None, typer.Option(min=1, help="number of experts E")]
TopK = Annotated[int | None, typer.Option(min=1, help="experts per token K")]
ActivationOption = Annotated[str, typer.Option(help=", ".join(get_args(Activation)))]
WeightLayoutOption = Annotated[str, typer.Option(help="out_in: as nn.Linear; in_out: transposed")]
GateLayoutOption = Annotated[str, typer.Option(help="concatenated: all of gate, then all of up; interleaved; none")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """One MoE layer's experts."""

    model_width: int
    expert_width: int
    top_k: int
    has_biases: bool
    spec: ExpertsSpec


def form_of_model(name_or_folder: str) -> ExpertForm:
    """The experts of the first MoE layer.

    Raises:
        typer.BadParameter: no such model.
        UnsupportedMoE: none of its layers is recognised.
    """
    match = _first_match(name_or_folder)
    model = meta_model(name_or_folder, num_layers=2)
    stacked = next(iter(find_moe_modules(model))).module
    parameters = list(stacked.parameters(recurse=False))
    down = min((one for one in parameters if one.dim() == 3), key=torch.Tensor.numel)
    num_experts, *widths = down.shape
    top_k = getattr(model.config, "num_experts_per_tok", None)
    if top_k is None:
        raise UnsupportedMoE(
            f"the configuration of '{name_or_folder}' must say num_experts_per_tok, got none; "
            "pass --hidden, --expert-width, --experts and --top-k"
        )
    model_width, expert_width = widths if match.spec.weight_layout == "out_in" else widths[::-1]
    return ExpertForm(
        model_width=model_width,
        expert_width=expert_width,
        top_k=top_k,
        has_biases=match.down_bias is not None,
        spec=dataclasses.replace(match.spec, num_experts=num_experts),
    )


def spec_of_options(num_experts: int, activation: str, weight_layout: str, gate_layout: str) -> ExpertsSpec:
    """The experts of these words, with some parameters of the activation.

    Raises:
        typer.BadParameter: an unknown word.
    """
    for option, value, words in (
        ("--activation", activation, get_args(Activation)),
        ("--weight-layout", weight_layout, get_args(WeightLayout)),
        ("--gate-layout", gate_layout, get_args(GateLayout)),
    ):
        if value not in words:
            raise typer.BadParameter(f"{option} must be one of {', '.join(words)}; got {value!r}")
    return ExpertsSpec(
        weight_layout=weight_layout,  # type: ignore[arg-type]  # checked above
        gate_layout=gate_layout,  # type: ignore[arg-type]
        activation=activation,  # type: ignore[arg-type]
        activation_params=(_ACTIVATION_PARAM,) * len(ACTIVATION_PARAMS[activation]),
        num_experts=num_experts,
    )


def _first_match(name_or_folder: str) -> MoEMatch:
    model = random_model(
        name_or_folder, num_layers=2, width=Width.reduced, dtype=DType.bfloat16, implementation="grouped_mm"
    )
    found: list[object] = []

    def only_match(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(find_moe_layers(aten_view(gm)))
        return gm.forward

    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        torch.compile(model, backend=only_match)(random_tokens(model, (1, 4)), use_cache=False)
    match = next((one for one in found if isinstance(one, MoEMatch)), None)
    if match is None:
        raise UnsupportedMoE(
            f"a MoE layer of '{name_or_folder}' must be recognised to know its experts, got {found or 'no MoE layer'}; "
            f"see `perseus explain {name_or_folder}`, or pass --hidden, --expert-width, --experts and --top-k"
        )
    return match
