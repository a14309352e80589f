"""What tests of whole models share: inputs, a float64 copy, gradients in groups of enough elements."""

from __future__ import annotations

import copy

import torch

# A compiled model may be this much farther from float64 than eager is; both round in the same dtype.
ERROR_FACTOR = 1.5
# The median error of fewer elements is chance; such gradients are judged together.
_MIN_ELEMENTS = 256


def token_ids(num_tokens: int, batch: int = 2, *, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 100, (batch, num_tokens), generator=torch.Generator().manual_seed(seed))


def float64_copy(model: torch.nn.Module) -> torch.nn.Module:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("batched_mm")  # torch's grouped GEMM has no float64
    return exact


def gradients_by_group(*models: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Gradients of every model, by parameter; those of few elements in one group, over the last model's largest."""
    groups: dict[str, list[list[torch.Tensor]]] = {}
    for named in zip(*(model.named_parameters() for model in models), strict=True):
        name = named[0][0]
        grads = [parameter.grad for _, parameter in named]
        assert len({grad is None for grad in grads}) == 1, f"only some models have a gradient of {name}"
        if grads[-1] is None:
            continue
        is_small = grads[-1].numel() < _MIN_ELEMENTS
        largest = grads[-1].abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        of_models = groups.setdefault("small parameters" if is_small else name, [[] for _ in models])
        for of_model, grad in zip(of_models, grads, strict=True):
            of_model.append((grad.double() / largest if is_small else grad).flatten())
    return {name: [torch.cat(parts) for parts in of_models] for name, of_models in groups.items()}
