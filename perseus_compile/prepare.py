"""How does a model become one that the backend can capture, and whose experts a group of ranks can share?

Switches the implementation of experts that run in a Python loop, through the model's public interface, or gives single
modules a loop over all experts; and, where a process group is given, replaces each experts module by one that holds
this rank's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from perseus_compile.comm.group import RankGroup, find_group, require_same
from perseus_compile.errors import PerseusError, UnsupportedMoE
from perseus_compile.looped_experts import replace_loop
from perseus_compile.moe_modules import MoEModule, find_moe_modules, switchable
from perseus_compile.read_experts import ExpertsReading, read_experts
from perseus_compile.sharded_experts import ShardedExperts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = TypeVar("Model", bound=nn.Module)

# Implementations in which Dynamo sees all experts in one graph, with no loop over those that were hit.
_CAPTURABLE = ("grouped_mm", "batched_mm")


def prepare(model: Model, ep_group: ProcessGroup | None = None, *, max_tokens_per_rank: int = 0) -> Model:
    """Makes the experts of a Hugging Face model capturable by ``torch.compile``, in place, and spreads them over ranks.

    Calls ``model.set_experts_implementation("grouped_mm")`` where a MoE layer runs in another implementation, for
    example in the Python loop that is called "eager". Experts of some other families, whose loop runs over the experts
    that were hit, get a forward of their own that runs over all experts; compile such a model with
    ``perseus_compile.compile``, which can capture it. A model that is capturable already, or that has no MoE layer, is
    left as it is.

    With ``ep_group``, each rank keeps an equal slice of every layer's experts and frees the rest. Each rank then runs
    the model on tokens of its own, and the result is that of the whole model on those tokens. All ranks must begin with
    the same weights and make the same calls; gradients of experts are those of the sum of all ranks' losses, all other
    gradients are those of this rank's loss. Make optimizers afterwards. ``state_dict`` gathers whole tensors and
    ``load_state_dict`` takes them: all ranks must call them.

    Args:
        model: on a device, with its weights; the same on every rank.
        ep_group: the ranks that share the experts; every one of them must call this. None: experts stay whole.
        max_tokens_per_rank: a call with more tokens on any rank is an error on all ranks; 0: no limit.

    Returns:
        The same model.

    Raises:
        UnsupportedMoE: the model has MoE layers but offers no other implementation of them, or refuses the switch; or
            its experts cannot be shared: their number is not divisible, or they are no weighted sum of expert MLPs.
        GroupError: ``ep_group`` is gone, or the model differs between ranks.
    """
    if ep_group is None:
        _make_capturable(model)
    else:
        _share_experts(model, find_group(ep_group.group_name), max_tokens_per_rank)
    return model


def _share_experts(model: nn.Module, group: RankGroup, max_tokens_per_rank: int) -> None:
    layers: list[MoEModule] = []
    readings: list[ExpertsReading] = []
    text: str | PerseusError
    try:
        _make_capturable(model)
        layers = _shareable(model)
        readings = [_read_layer(layer, group) for layer in layers]
        text = _describe(layers, readings, max_tokens_per_rank)
    except PerseusError as error:
        text = error
    require_same(group, text, "the model that prepare() shares")
    while layers:  # each whole layer is freed before the next one is sliced
        experts, reading = layers.pop().module, readings.pop()
        shared = ShardedExperts(experts, reading, group, max_tokens_per_rank)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is experts:
                    setattr(parent, name, shared)


def _shareable(model: nn.Module) -> list[MoEModule]:
    layers = [layer for layer in find_moe_modules(model) if switchable(layer)]
    if layers and all(layer.owner is not None for layer in layers):
        return layers
    if layers:
        raise UnsupportedMoE(
            f"prepare() needs the module around the experts to share them, got {type(model).__name__} itself; pass the "
            "whole model"
        )
    if any(isinstance(module, ShardedExperts) for module in model.modules()):
        raise UnsupportedMoE("prepare() shares the experts of a model once, these are shared already; call it once")
    raise UnsupportedMoE(
        f"prepare() can share the experts of Hugging Face models that offer set_experts_implementation, got "
        f"{type(model).__name__} without such experts; leave ep_group out"
    )


def _read_layer(layer: MoEModule, group: RankGroup) -> ExpertsReading:
    reading = read_experts(layer.module, layer.num_experts)
    if layer.num_experts % group.size:
        raise UnsupportedMoE(
            f"the number of experts must be divisible by the {group.size} ranks of group {group.name!r}, got "
            f"{layer.num_experts} experts in '{layer.path}'; pass a group of another size"
        )
    return reading


def _describe(layers: list[MoEModule], readings: list[ExpertsReading], max_tokens_per_rank: int) -> str:
    lines = [f"max_tokens_per_rank={max_tokens_per_rank}"]
    for layer, reading in zip(layers, readings, strict=True):
        tensors = [f"{name} {p.dtype} {list(p.shape)}" for name, p in layer.module.named_parameters()]
        lines.append(f"{layer.path}: {', '.join(tensors)}; {reading.spec}")
    return "\n  ".join(lines)


def _make_capturable(model: nn.Module) -> None:
    done = [module for module in model.modules() if isinstance(module, ShardedExperts) or replace_loop(module)]
    inside = {id(module) for each in done for module in each.modules()}
    found = [layer for layer in find_moe_modules(model) if id(layer.module) not in inside]
    if not found or all(switchable(layer) and _implementation(layer) in _CAPTURABLE for layer in found):
        return
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
