"""How does a model whose experts run in a Python loop become one that a compiler can capture?

Switches the implementation through the model's public interface, or gives single modules a loop over all experts. It
changes no weight and compiles nothing.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from perseus_compile.errors import UnsupportedMoE
from perseus_compile.looped_experts import replace_loop
from perseus_compile.moe_modules import MoEModule, find_moe_modules, switchable

Model = TypeVar("Model", bound=nn.Module)

# Implementations in which Dynamo sees all experts in one graph, with no loop over those that were hit.
_CAPTURABLE = ("grouped_mm", "batched_mm")


def prepare(model: Model) -> Model:
    """Makes the experts of a Hugging Face model capturable by ``torch.compile``, in place.

    Calls ``model.set_experts_implementation("grouped_mm")`` where a MoE layer runs in another implementation, for
    example in the Python loop that is called "eager". Experts of some other families, whose loop runs over the experts
    that were hit, get a forward of their own that runs over all experts; compile such a model with
    ``perseus_compile.compile``, which can capture it. A model that is capturable already, or that has no MoE layer, is
    left as it is.

    Returns:
        The same model.

    Raises:
        UnsupportedMoE: the model has MoE layers but offers no other implementation of them, or refuses the switch.
    """
    replaced = [module for module in model.modules() if replace_loop(module)]
    inside = {id(module) for each in replaced for module in each.modules()}
    found = [layer for layer in find_moe_modules(model) if id(layer.module) not in inside]
    if not found or all(switchable(layer) and _implementation(layer) in _CAPTURABLE for layer in found):
        return model
    switches = _outermost_switches(model)
    if not switches or not any(switchable(layer) for layer in found):
        raise UnsupportedMoE(_no_switch_message(model, found))
    for module in switches:
        try:
            module.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        except (ImportError, RuntimeError, ValueError) as error:
            raise UnsupportedMoE(
                f"prepare() needs {type(module).__name__}.set_experts_implementation('grouped_mm') to succeed, but the "
                f"model refused: {error}. Load the model with experts_implementation='grouped_mm', or compile it as it "
                "is and see perseus_compile.explain(model, ...)"
            ) from error
    return model


def _implementation(layer: MoEModule) -> str | None:
    # NOTE: transformers has no public accessor of a single module's choice; this one is stable from 5.0 on.
    return getattr(layer.module.config, "_experts_implementation", None)


def _outermost_switches(model: nn.Module) -> list[nn.Module]:
    """The model, or the largest modules inside it, that offer ``set_experts_implementation``."""
    switches: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in switches)
        if not inside and callable(getattr(module, "set_experts_implementation", None)):
            switches[path] = module
    return list(switches.values())


def _no_switch_message(model: nn.Module, found: list[MoEModule]) -> str:
    first = found[0]
    return (
        "prepare() needs a model that offers set_experts_implementation for its MoE layers (Hugging Face transformers "
        f">= 5.0), got {type(model).__name__} whose layer '{first.path}' ({type(first.module).__name__}, "
        f"{first.num_experts} experts) offers none. Compile it with perseus_compile.compile(model), which can capture "
        "loops over range(num_experts), and see perseus_compile.explain(model, ...) for what is left"
    )
