"""Random calls of the perseus ops, their exact results, and a watch on the operators that a call runs.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perseus_compile import lower, reference

# The largest allowed error, as a share of the largest value that is expected (or of 1, which is the size of the values
# that `make_case` leads to). The worst error in this folder is a quarter to a half of each number (AVX-512, 2 threads).
TOLERANCE = {
    torch.float64: 3e-15,  # sums of up to a few hundred products in another order; epsilon is 2.2e-16
    torch.float32: 1.5e-6,  # the same; epsilon is 1.2e-7
    torch.bfloat16: 4e-2,  # hidden values, activation, output of an expert and result are each rounded; epsilon is 8e-3
    torch.float16: 4e-3,  # as bfloat16; epsilon is 1e-3
}

NAMES = ("x", "ids", "weights", "gate_up", "gate_up_bias", "down", "down_bias")
DIFFERENTIABLE = tuple(name for name in NAMES if name != "ids")
ACTIVATIONS: dict[str, list[float]] = {
    "silu": [],
    "gelu": [],
    "gelu_tanh": [],
    "relu": [],
    "relu2": [],
    "clamped_swiglu": [1.7, 1.0],
    "clamped_silu": [1.0],
    "softcapped_silu": [1.5, 2.0],
}
# Every combination of words; biases with half of them, so that each pair of words is met with and without.
FORMS: tuple[dict[str, Any], ...] = tuple(
    {
        "activation": activation,
        "weight_layout": weight_layout,
        "gate_layout": gate_layout,
        "weight_on": weight_on,
        "biases": (a + w + g + on) % 2 == 0,
    }
    for a, activation in enumerate(ACTIVATIONS)
    for w, weight_layout in enumerate(("out_in", "in_out"))
    for g, gate_layout in enumerate(("concatenated", "interleaved", "none"))
    for on, weight_on in enumerate(("output", "input"))
    if gate_layout != "none" or not ACTIVATIONS[activation]
)


def form_name(form: dict[str, Any]) -> str:
    return "-".join(str(value) for value in form.values())


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of perseus::experts: tensors in schema order and the numbers."""

    tensors: tuple[Tensor | None, ...]
    numbers: dict[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[NAMES.index(name)]
        assert tensor is not None
        return tensor

    def having(self, **changes: Any) -> Case:
        """The same call with other tensors or numbers."""
        tensors = [changes.pop(name, tensor) for name, tensor in zip(NAMES, self.tensors, strict=True)]
        return Case(tuple(tensors), {**self.numbers, **changes})

    def on(self, tokens: Sequence[int] | Tensor) -> Case:
        """The call for some of the tokens."""
        index = torch.as_tensor(tokens, dtype=torch.int64)
        return self.having(**{name: self[name][index] for name in ("x", "ids", "weights")})

    def to(self, device: str) -> Case:
        return Case(tuple(None if one is None else one.to(device) for one in self.tensors), self.numbers)

    def run(self) -> Tensor:
        return torch.ops.perseus.experts(*self.tensors, **self.numbers)

    def exact(self) -> Case:
        """The same numbers in float64, whose reference is exact beside every other dtype."""
        wide = [one.double() if one is not None and one.is_floating_point() else one for one in self.tensors]
        return Case(tuple(wide), self.numbers)

    def reference(self) -> Tensor:
        return reference.experts(*self.tensors, **self.numbers)  # type: ignore[arg-type]

    def backward(self, grad: Tensor, needs_grad: Sequence[bool] | None = None) -> list[Tensor]:
        """perseus::experts_backward; by default for everything that is there."""
        if needs_grad is None:
            needs_grad = [tensor is not None for name, tensor in zip(NAMES, self.tensors, strict=True) if name != "ids"]
        return torch.ops.perseus.experts_backward(grad, *self.tensors, **self.numbers, needs_grad=list(needs_grad))

    def leaves(self, names: Sequence[str] = DIFFERENTIABLE) -> Case:
        """The same call on fresh leaves, of which those named require gradients."""
        fresh = [None if tensor is None else tensor.detach().clone() for tensor in self.tensors]
        for name, tensor in zip(NAMES, fresh, strict=True):
            if tensor is not None and name in names:
                tensor.requires_grad_(True)
        return Case(tuple(fresh), self.numbers)

    def required(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor is not None and tensor.requires_grad]


def make_case(
    *,
    num_tokens: int = 7,
    num_choices: int = 2,
    num_local: int = 4,
    num_experts: int | None = None,
    expert_offset: int = 0,
    width: int = 10,
    inner: int = 6,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    ids: Tensor | None = None,
    activation: str = "silu",
    weight_layout: str = "out_in",
    gate_layout: str = "concatenated",
    weight_on: str = "output",
    biases: bool = True,
    seed: int = 0,
) -> Case:
    """Values of about 1 everywhere, so that tolerances mean the same in every case; ids are drawn with repetition."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = expert_offset + num_local if num_experts is None else num_experts

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        scale = 1.5 / math.sqrt(max(1, fan_in))
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    if ids is None:
        ids = torch.randint(0, num_experts, (num_tokens, num_choices), generator=generator)
    weights = 0.3 + torch.rand(ids.shape, generator=generator, dtype=torch.float64)
    hidden = inner if gate_layout == "none" else 2 * inner
    gate_up, down = (num_local, hidden, width), (num_local, width, inner)
    if weight_layout == "in_out":
        gate_up, down = (num_local, width, hidden), (num_local, inner, width)
    tensors = (
        normal(ids.shape[0], width),
        ids,
        weights.to(weights_dtype or dtype),
        normal(*gate_up, fan_in=width),
        normal(num_local, hidden) if biases else None,
        normal(*down, fan_in=inner),
        normal(num_local, width) if biases else None,
    )
    numbers = {
        "weight_layout": weight_layout,
        "gate_layout": gate_layout,
        "activation": activation,
        "activation_params": ACTIVATIONS[activation],
        "weight_on": weight_on,
        "num_experts": num_experts,
        "expert_offset": expert_offset,
    }
    return Case(tensors, numbers)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For hundreds of tiny calls: on a busy machine, threads that wait for each other cost far more than they save."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def few_rows(dtype: torch.dtype) -> int:
    """An expert with more rows than this runs as a GEMM."""
    return lower.FEW_ROWS.get(dtype, 0)


def has_few_rows(form: dict[str, Any]) -> bool:
    """Whether the few-row loops know the form, so that not every expert runs as a GEMM."""
    return form["activation"] in lower.FEW_ROWS_ACTIVATIONS and form["gate_layout"] != "none"


def ids_with_rows(*rows_of_expert: int) -> Tensor:
    """One choice per token, [T, 1]: so many tokens for each expert, in mixed order."""
    ids = torch.cat([torch.full((rows,), expert) for expert, rows in enumerate(rows_of_expert)])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1)), None]


def assert_near(have: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal within the tolerance of ``have``'s dtype, or of the dtype that the numbers went through; NaN where NaN."""
    assert have.shape == want.shape
    finite = want.detach()[want.isfinite()]
    scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    tolerance = scale * TOLERANCE[dtype or have.dtype]
    torch.testing.assert_close(have.double(), want.double(), rtol=0, atol=tolerance, equal_nan=True)


def assert_same_bits(have: Sequence[Tensor] | Tensor, want: Sequence[Tensor] | Tensor) -> None:
    """Equal bit for bit, NaNs included."""
    if isinstance(have, Tensor) and isinstance(want, Tensor):
        have, want = [have], [want]
    assert len(have) == len(want)
    for one, other in zip(have, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Watch(TorchDispatchMode):
    """The torch operators that run inside the perseus ops, and those that read the storage of a watched tensor."""

    def __init__(self, *watched: Tensor) -> None:
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in watched}
        self.names: list[str] = []
        self.readers: set[str] = set()
        self.gemm_shapes: list[tuple[int, ...]] = []
        self.largest_result = 0  # elements of the largest tensor that is not a view of a watched one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "perseus":
            with self:  # a mode is off while it handles an operator: turn it on again to see the inside
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        self.names.append(name)
        if any(self._watches(one) for one in tensors):
            self.readers.add(name)
        out = func(*args, **kwargs)
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.gemm_shapes.append(tuple(out.shape))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor) and not self._watches(one):
                self.largest_result = max(self.largest_result, one.numel())
        return out

    def _watches(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages
