"""Which model does a command work on? A Hugging Face architecture name or a config.json, always with random weights."""

from __future__ import annotations

import difflib
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from perseus_compile.errors import UnsupportedMoE
from perseus_compile.testing.models import config_for, random_causal_lm, small_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


DEFAULT_IMPLEMENTATION = "grouped_mm"


class Width(str, enum.Enum):
    """reduced: all sizes small, seconds on any machine. full: the sizes of the real model."""

    reduced = "reduced"
    full = "full"


class DType(str, enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.value)


def require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise typer.BadParameter(
            "this command builds Hugging Face models and needs transformers: pip install 'perseus_compile[hf]'"
        ) from error


def random_model(
    name_or_folder: str, *, num_layers: int, width: Width, dtype: DType, implementation: str | None
) -> PreTrainedModel:
    """A causal LM with random weights.

    Raises:
        typer.BadParameter: neither a known model_type nor a folder with a config.json; or too large for the memory; or
            the model has no such implementation, and it is not the default.
        UnsupportedMoE: transformers cannot build the configuration as a causal LM.
    """
    require_transformers()
    model_type, base = _model_type_and_base(name_or_folder)
    sizes = small_sizes(model_type) if width is Width.reduced else {}
    try:
        config = config_for(model_type, num_layers=num_layers, base=base, **sizes)
        _check_memory(config, dtype.torch_dtype)
        model = random_causal_lm(config, dtype=dtype.torch_dtype, implementation=None)
    except typer.BadParameter:
        raise
    except Exception as error:
        # Configurations check their fields in many ways; none of them is a defect of this command.
        raise UnsupportedMoE(
            f"transformers must be able to build '{model_type}' as a causal LM of width {width.value}, it said: "
            f"{str(error).removesuffix('.')}. Try --width full, or a folder with a config.json"
        ) from error
    try:
        if implementation is not None:
            model.set_experts_implementation(implementation)
    except ValueError as error:
        if implementation != DEFAULT_IMPLEMENTATION:  # else the model has its own code, or no experts
            raise typer.BadParameter(f"--implementation must be one that {model_type} has: {error}") from error
    return model


def _model_type_and_base(name_or_folder: str) -> tuple[str, dict[str, Any] | None]:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if (Path(name_or_folder) / "config.json").is_file():
        base, _ = PretrainedConfig.get_config_dict(name_or_folder, local_files_only=True)
        return base["model_type"], base
    if name_or_folder in CONFIG_MAPPING:
        return name_or_folder, None
    close = difflib.get_close_matches(name_or_folder, list(CONFIG_MAPPING), n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise typer.BadParameter(
        f"must be a Hugging Face model_type such as qwen3_moe, or a folder with a config.json; got "
        f"'{name_or_folder}'{hint}"
    )


def meta_model(name_or_folder: str, *, num_layers: int) -> PreTrainedModel:
    """The causal LM in its full width, without memory: all parameters are on the meta device.

    Raises:
        typer.BadParameter: neither a known model_type nor a folder with a config.json.
    """
    require_transformers()
    model_type, base = _model_type_and_base(name_or_folder)
    return _on_meta(config_for(model_type, num_layers=num_layers, base=base), torch.bfloat16)


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _check_memory(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Counts the parameters on the meta device before any memory is used."""
    model = _on_meta(config, dtype)
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    available = _available_bytes()
    if available is not None and needed > 0.8 * available:
        raise typer.BadParameter(
            f"the weights need {needed / 1e9:.1f} GB, this machine has {available / 1e9:.1f} GB free; use --layers 1, "
            "--dtype bfloat16 or --width reduced"
        )


def _available_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
