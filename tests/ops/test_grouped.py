"""The plain path, perseus_compile/grouped.py: the reference's numbers and gradients, no host wait, no copied weight."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import ACTIVATIONS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perseus_compile import grouped, reference
from perseus_compile.facts import ExpertsSpec

on_devices = pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
FORMS = [
    {"activation": activation, "weight_layout": weights, "gate_layout": gates, "bias": bias, "weight_on": weight_on}
    for activation, weights, gates, bias, weight_on in itertools.product(
        ACTIVATIONS,
        ("out_in", "in_out"),
        ("concatenated", "interleaved", "none"),
        (False, True),
        ("output", "input"),
    )
    if gates != "none" or not ACTIVATIONS[activation]
]
# Largest error relative to the norm of the result. The GEMMs, the activation between them and the output round once
# each: a CPU comes to 0.0012 in float16 and 0.009 in bfloat16. The rest is for small results whose terms cancel.
TOLERANCE = {torch.float16: 0.006, torch.bfloat16: 0.05}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, in the order of ``grouped.forward``."""

    tensors: tuple[Any, ...]  # x, ids, weights, gate_up, gate_up_bias, down, down_bias
    spec: ExpertsSpec

    def replaced(self, **tensors: Tensor) -> Case:
        names = ("x", "ids", "weights", "gate_up", "gate_up_bias", "down", "down_bias")
        return Case(tuple(tensors.get(name, old) for name, old in zip(names, self.tensors, strict=True)), self.spec)

    def forward(self) -> Tensor:
        return grouped.forward(*self.tensors, self.spec)

    def backward(self, grad: Tensor, needs_grad: Sequence[bool] | None = None) -> list[Tensor]:
        everything = [tensor is not None for index, tensor in enumerate(self.tensors) if index != 1]
        return grouped.backward(grad, *self.tensors, self.spec, needs_grad or everything)

    def grad(self) -> Tensor:
        """What the loss hands to backward: fixed by the shape."""
        x = self.tensors[0]
        return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device, x.dtype)

    def results(self, grad: Tensor | None = None) -> list[Tensor]:
        """The output and all gradients."""
        return [self.forward(), *self.backward(self.grad() if grad is None else grad)]


def working_dtype(device: str) -> torch.dtype:
    """On CUDA only bfloat16 has a grouped GEMM that the host does not wait for."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def make(
    device: str,
    *,
    dtype: torch.dtype | None = None,
    num_tokens: int = 17,
    num_choices: int = 3,
    num_local: int = 5,
    offset: int = 2,
    num_experts: int = 9,
    width: int = 16,
    inner: int = 24,
    bias: bool = True,
    ids_dtype: torch.dtype = torch.int64,
    seed: int = 0,
    **numbers: Any,
) -> Case:
    """Random tensors; ids are drawn from two below the first expert of all to two above the last one."""
    numbers = {"weight_layout": "out_in", "gate_layout": "concatenated", "activation": "silu", **numbers}
    dtype = dtype or working_dtype(device)
    params = tuple(ACTIVATIONS[numbers["activation"]])
    if params and numbers["activation"].startswith("clamped") and dtype != torch.float32:
        # The gradient jumps at the limit of the clamp, and in low precision a value may round to its other side.
        params = (*params[:-1], 100.0)
    spec = ExpertsSpec(activation_params=params, num_experts=num_experts, expert_offset=offset, **numbers)
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, num_experts + 2, (num_tokens, num_choices), generator=random)
    weights = torch.rand(num_tokens, num_choices, generator=random)
    hidden = inner if spec.gate_layout == "none" else 2 * inner
    shapes = ((num_tokens, width), (num_local, hidden, width), (num_local, hidden))
    shapes += ((num_local, width, inner), (num_local, width))
    x, gate_up, gate_up_bias, down, down_bias = (torch.randn(shape, generator=random) for shape in shapes)
    gate_up, down = gate_up / width**0.5, down / inner**0.5
    if spec.weight_layout == "in_out":
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (gate_up_bias.to(device, dtype), down_bias.to(device, dtype)) if bias else (None, None)
    x, gate_up, down = (one.to(device, dtype) for one in (x, gate_up, down))
    return Case((x, ids.to(device, ids_dtype), weights.to(device), gate_up, biases[0], down, biases[1]), spec)


def reference_of(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Output and all gradients in float64 on the CPU."""
    leaves = [
        tensor.detach().cpu().double().requires_grad_() if tensor is not None and tensor.is_floating_point() else tensor
        for tensor in case.tensors
    ]
    leaves[1] = leaves[1].cpu()
    out = reference.experts(*leaves, **case.spec.as_kwargs())
    asked = [leaf for index, leaf in enumerate(leaves) if leaf is not None and index != 1]
    if not out.requires_grad:
        return out, [torch.zeros_like(leaf) for leaf in asked]  # no choice has an expert
    grads = torch.autograd.grad(out, asked, case.grad().cpu().double(), allow_unused=True, materialize_grads=True)
    return out.detach(), list(grads)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """``dtype`` is the lowest that was computed in."""
    got = got.detach().cpu().double()
    assert got.shape == want.shape
    if dtype == torch.float32:
        scale = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, scale))
    else:
        assert float((got - want).norm()) <= TOLERANCE[dtype] * max(want.numel() ** 0.5, float(want.norm()))


def check(case: Case) -> None:
    """Output and every gradient against the reference, and what holds for each: dtype, contiguity."""
    want, want_grads = reference_of(case)
    x, _, *rest = case.tensors
    inputs = [x, x, *[one for one in rest if one is not None]]
    for have, expected, like in zip(case.results(), [want, *want_grads], inputs, strict=True):
        assert have.dtype == like.dtype and have.is_contiguous()
        assert_near(have, expected, have.dtype if have.dtype in TOLERANCE else x.dtype)


def assert_same(have: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """The same bits."""
    assert [torch.equal(one, other) for one, other in zip(have, want, strict=True)] == [True] * len(want)


@on_devices
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_every_form(form: dict[str, Any], device: str) -> None:
    check(make(device, num_tokens=9, **form))


@on_devices
def test_clamps_in_low_precision(device: str) -> None:
    """Forward only: there a value that rounds across the limit does no harm."""
    case = make(device, dtype=torch.bfloat16, activation="clamped_swiglu")
    case = Case(case.tensors, dataclasses.replace(case.spec, activation_params=(1.702, 1.0)))
    assert_near(case.forward(), reference_of(case)[0], torch.bfloat16)


@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_low_precision(dtype: torch.dtype, weight_on: str) -> None:
    check(make("cpu", dtype=dtype, num_tokens=64, width=64, inner=40, weight_on=weight_on))


@on_devices
@pytest.mark.parametrize("num_choices", (1, 4))
@pytest.mark.parametrize("num_tokens", (0, 1, 2, 17))
def test_token_counts(num_tokens: int, num_choices: int, device: str) -> None:
    """One token leaves most experts empty: their gradients are zeros."""
    check(make(device, num_tokens=num_tokens, num_choices=num_choices, num_local=7))


@on_devices
def test_no_choice_and_no_local_expert(device: str) -> None:
    check(make(device, num_choices=0))
    check(make(device, num_local=0))


@on_devices
@pytest.mark.parametrize("weights_dtype", (torch.bfloat16, torch.float64))
def test_dtype_of_the_weights(weights_dtype: torch.dtype, device: str) -> None:
    case = make(device)
    check(case.replaced(weights=case.tensors[2].to(weights_dtype)))


@on_devices
def test_duplicated_ids_add(device: str) -> None:
    case = make(device)
    check(case.replaced(ids=torch.full_like(case.tensors[1], 4)))


@on_devices
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_skipped_choices_add_nothing_whatever_they_hold(weight_on: str, device: str) -> None:
    case = make(device, weight_on=weight_on)
    x, ids, weights, *_ = case.tensors
    for foreign in (1, 7, -1, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max):
        poisoned = case.replaced(
            x=torch.full_like(x, torch.nan),
            ids=torch.full_like(ids, foreign),
            weights=torch.full_like(weights, torch.inf),
        )
        results = poisoned.results()
        assert_same(results, [torch.zeros_like(one) for one in results])


@on_devices
def test_order_of_the_sum_is_the_order_of_the_choices(device: str) -> None:
    """With x = 0 an expert returns its bias; in float32 (2**24 + 1) - 2**24 is 0 and (2**24 - 2**24) + 1 is 1."""
    case = make(device, num_tokens=2, num_local=3, offset=0, num_experts=3)
    x, _, weights, gate_up, gate_up_bias, _, down_bias = case.tensors
    big = torch.tensor([2.0**24, 1.0, -(2.0**24)], device=device)
    case = case.replaced(
        x=torch.zeros_like(x),
        ids=torch.tensor([[0, 1, 2], [0, 2, 1]], device=device),
        weights=torch.ones_like(weights),
        gate_up=torch.zeros_like(gate_up),
        gate_up_bias=torch.zeros_like(gate_up_bias),
        down_bias=big[:, None].expand_as(down_bias).to(down_bias.dtype).contiguous(),
    )
    assert case.forward()[:, 0].tolist() == [0.0, 1.0]


@on_devices
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_a_poisoned_token_stays_in_its_row(weight_on: str, device: str) -> None:
    case = make(device, num_tokens=40, weight_on=weight_on)
    ids = case.tensors[1].clone()
    ids[3] = torch.tensor([2, 4, 2])
    ids[5] = torch.tensor([4, 2, -1])
    case = case.replaced(ids=ids)
    x, weights = case.tensors[0].clone(), case.tensors[2].clone()
    x[3, 1] = torch.nan
    x[5] = torch.inf
    weights[5, 0] = torch.nan
    poisoned = case.replaced(x=x, weights=weights)

    others = torch.tensor([token for token in range(40) if token not in (3, 5)], device=device)
    clean, results = case.results(), poisoned.results()  # output, gradients of x and weights, then of the experts
    assert_same([one[others] for one in results[:3]], [one[others] for one in clean[:3]])
    assert results[0][3].isnan().all() and results[0][5].isnan().all()
    untouched = torch.tensor([1, 3, 4], device=device)  # the tokens chose experts 2 and 4: local 0 and 2
    assert_same([one[untouched] for one in results[3:]], [one[untouched] for one in clean[3:]])
    assert results[3][0].isnan().any() and results[3][2].isnan().any()


@on_devices
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_rows_that_the_grouped_gemm_leaves_uninitialised(
    weight_on: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(device, num_tokens=40, weight_on=weight_on)
    clean = case.results()
    calls = 0

    def poisoning(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        nonlocal calls
        out = torch.nn.functional.grouped_mm(left, right, offs=offs)
        if right.dim() == 3:
            calls += 1
            out[int(offs[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(grouped, "grouped_mm", poisoning)
    assert_same(case.results(), clean)
    assert calls == 5


@on_devices
def test_same_bits_from_run_to_run(device: str) -> None:
    case = make(device, num_tokens=300, num_local=3)
    assert_same(case.results(), case.results())


@on_devices
@pytest.mark.parametrize("needs_grad", [[index == asked for index in range(6)] for asked in range(6)])
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_only_the_asked_gradients(needs_grad: list[bool], weight_on: str, device: str) -> None:
    case = make(device, weight_on=weight_on)
    (asked,) = case.backward(case.grad(), needs_grad)
    assert torch.equal(asked, case.backward(case.grad())[needs_grad.index(True)])


def _padded(tensor: Tensor) -> Tensor:
    """The same values in a wider storage: the last axis is dense, the others are not."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 8, dtype=tensor.dtype, device=tensor.device)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def _transposed(tensor: Tensor) -> Tensor:
    """The same values with the last two axes swapped in memory."""
    return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)


@on_devices
@pytest.mark.parametrize("weight_strides", (_padded, _transposed))
def test_odd_strides(weight_strides: Callable[[Tensor], Tensor], device: str) -> None:
    case = make(device, gate_layout="interleaved")
    x, ids, weights, gate_up, _, down, _ = case.tensors
    grad = torch.full((1, 1), 0.5, device=device, dtype=x.dtype).expand(x.shape)
    odd = case.replaced(
        x=_transposed(x),
        ids=_transposed(ids),
        weights=_padded(weights),
        gate_up=weight_strides(gate_up),
        down=weight_strides(down),
    )
    assert grouped.unsupported_reason(odd.tensors[0], odd.tensors[3], odd.tensors[5], odd.spec) is None
    for have, want in zip(odd.results(grad), case.results(grad.contiguous()), strict=True):
        assert have.is_contiguous()
        assert_near(have, want.cpu().double(), working_dtype(device))


class _Watch(TorchDispatchMode):
    """Every operator that runs, and those that read the storage of a watched tensor."""

    def __init__(self, watched: Sequence[Tensor]) -> None:
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in watched}
        self.names: list[str] = []
        self.readers: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        self.names.append(name)
        if any(one.untyped_storage().data_ptr() in self._storages for one in tensors):
            self.readers.add(name)
        if name == "_to_copy":
            assert kwargs.get("device") in (None, tensors[0].device)
        return func(*args, **kwargs)


# Operators whose result or shape the host must wait for.
SYNCHRONISING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "index", "index_put_", "unique",
    "_unique2", "unique_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip


@on_devices
@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
def test_no_host_wait_and_no_copied_weight(weight_layout: str, device: str) -> None:
    case = make(device, weight_layout=weight_layout, weight_on="input")
    grad = case.grad()
    with _Watch([case.tensors[3], case.tensors[5]]) as watch:
        case.results(grad)
    assert watch.names.count("_grouped_mm") == 2 + 3 + 4
    assert SYNCHRONISING.isdisjoint(watch.names)
    assert watch.readers == {"transpose", "_grouped_mm"}


@on_devices
def test_operators_do_not_depend_on_values(device: str) -> None:
    """What a CUDA graph records for one routing must serve all."""
    names = []
    for ids in (torch.full((17, 3), 2), torch.full((17, 3), -1), torch.arange(51).view(17, 3) % 9):
        case = make(device).replaced(ids=ids.to(device))
        grad = case.grad()
        with _Watch([]) as watch:
            case.results(grad)
        names.append(watch.names)
    assert names[0] == names[1] == names[2]


@on_devices
def test_below_autograd(device: str) -> None:
    """As in a kernel of the op: the inputs want gradients and nothing records."""
    case = make(device)
    want = case.results()
    for tensor in case.tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    with torch._C._AutoDispatchBelowAutograd():
        results = case.results()
    assert not any(one.requires_grad for one in results)
    assert_same(results, want)


@pytest.mark.gpu
def test_many_experts_on_cuda() -> None:
    check(make("cuda", num_tokens=40, num_local=1023, num_experts=1023, offset=0))


@pytest.mark.gpu
def test_the_host_never_waits() -> None:
    case = make("cuda")
    grad = case.grad()
    case.results(grad)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = case.results(grad)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(bool(one.isfinite().all()) for one in results)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_one_captured_graph_serves_every_routing(weight_on: str) -> None:
    case = make("cuda", num_tokens=64, weight_on=weight_on)
    grad = case.grad()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.results(grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.results(grad)
    for ids in (make("cpu", num_tokens=64, seed=5).tensors[1], torch.full((64, 3), 3), torch.full((64, 3), 99)):
        case.tensors[1].copy_(ids)
        graph.replay()
        assert_same(captured, case.results(grad))


@on_devices
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(data: st.DataObject, device: str) -> None:
    small = st.integers(0, 3)
    num_local, offset, above = data.draw(st.integers(1, 6)), data.draw(small), data.draw(small)
    check(
        make(
            device,
            num_tokens=data.draw(st.integers(0, 9)),
            num_choices=data.draw(st.integers(1, 4)),
            num_local=num_local,
            offset=offset,
            num_experts=offset + num_local + above,
            width=8 * data.draw(st.integers(1, 3)),
            inner=8 * data.draw(st.integers(1, 3)),
            ids_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
            seed=data.draw(st.integers(0, 1000)),
            **data.draw(st.sampled_from(FORMS)),
        )
    )
