"""Which modules of a model own experts? Reads the structure of modules, never their names; changes nothing.

Used where a person is to be told something about a module, by ``prepare`` and ``explain``. Rewriting does not depend
on it: that looks at the dataflow of the captured graph only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEModule:
    """A module that owns the weights of several experts.

    ``path`` is the dotted path in the model. ``owner`` is the module around it, which usually holds the router.
    """

    path: str
    module: nn.Module
    owner: nn.Module | None
    num_experts: int


def find_moe_modules(model: nn.Module) -> list[MoEModule]:
    """The modules of ``model`` that own experts, in the order of ``named_modules``.

    Two forms are known. Stacked: a module with at least two parameters of its own that have three axes and agree in
    the first, one entry per expert. Listed: a ``ModuleList`` or ``ModuleDict`` of modules of one type, next to which
    some weight has one row per entry, the router.
    """
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        owner = modules.get(path.rpartition(".")[0]) if path else None
        num_experts = _num_stacked(module) or _num_listed(module, owner)
        if num_experts:
            found.append(MoEModule(path=path, module=module, owner=owner, num_experts=num_experts))
    return found


def switchable(found: MoEModule) -> bool:
    """Whether the module chooses at each call how its experts run, as Hugging Face's decorated experts do."""
    return hasattr(found.module, "has_gate") and hasattr(found.module, "config")


def _num_stacked(module: nn.Module) -> int:
    leading = [parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return next((size for size in leading if size > 1 and leading.count(size) > 1), 0)


def _num_listed(module: nn.Module, owner: nn.Module | None) -> int:
    if owner is None or not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return 0
    entries = list(module.children())
    if len(entries) < 2 or len({type(entry) for entry in entries}) != 1:
        return 0
    has_router = any(weight.dim() == 2 and weight.shape[0] == len(entries) for weight in _beside(owner, module))
    return len(entries) if has_router else 0


def _beside(owner: nn.Module, module: nn.Module) -> Iterator[nn.Parameter]:
    yield from owner.parameters(recurse=False)
    for child in owner.children():
        if child is not module:
            yield from child.parameters()
