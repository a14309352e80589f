"""Is a call checked and planned once, does nothing that a plan depends on share one, and does it run on its device?

Calls run on CPU tensors here: their device index is -1, which is made the current "CUDA device".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perseus_compile import fused_experts, grouped, launch_cuda, ops, reference
from perseus_compile.call_sites import CallSites, experts_site
from perseus_compile.errors import LaunchError, UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, RoutingSpec, default_dtypes, op_arguments
from perseus_compile.jit import driver

NUMBERS = {
    "weight_layout": "out_in",
    "gate_layout": "concatenated",
    "activation": "clamped_swiglu",
    "activation_params": [1.5, 7.0],
    "weight_on": "output",
    "num_experts": 4,
    "expert_offset": 0,
}
ROUTER_NUMBERS = {
    "routing": "softmax_topk",
    "top_k": 2,
    "renormalize": True,
    "renormalize_eps": 0.0,
    "routing_scale": 1.0,
    "num_groups": 1,
    "topk_groups": 1,
    "router_dtype": torch.float32,
    "score_dtype": torch.float32,
    "weights_dtype": torch.float32,
}
UNCHANGED = {"weight_layout", "gate_layout", "weight_on", "expert_offset"}  # in NUMBERS they are the op's defaults
NAMES = ("x", "ids", "weights", "gate_up", "gate_up_bias", "down", "down_bias")


def _tensors(**changes: Any) -> list[Any]:
    """Arguments of the experts in schema order."""
    tensors = {
        "x": torch.randn(3, 16),
        "ids": torch.tensor([[0, 1], [2, 3], [3, 0]]),
        "weights": torch.rand(3, 2),
        "gate_up": torch.randn(4, 16, 16),
        "gate_up_bias": torch.randn(4, 16),
        "down": torch.randn(4, 16, 8),
        "down_bias": None,
    }
    return list({**tensors, **changes}.values())


def in_order(names: tuple[str, ...], numbers: dict[str, Any]) -> list[Any]:
    return [numbers[name] for name in names]


class Roads:
    """Calls of the CUDA kernels that take the plain path, and the number of plans that were made."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.current_device = -1
        self.entered: list[torch.device] = []

    def experts(self, tensors: list[Any], **changes: Any) -> Tensor:
        return ops._experts_on_cuda(*tensors, *in_order(ops._EXPERTS_NUMBERS, {**NUMBERS, **changes}))

    def moe(self, tensors: list[Any], **changes: Any) -> Tensor:
        return ops._moe_on_cuda(*tensors, *in_order(ops._MOE_NUMBERS, {**ROUTER_NUMBERS, **NUMBERS, **changes}))


@pytest.fixture
def roads(monkeypatch: pytest.MonkeyPatch) -> Roads:
    made = Roads()
    make_plan = fused_experts.make_plan

    def counted(*args: Any) -> fused_experts.Plan:
        made.num_plans += 1
        return make_plan(*args)

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Any:
        made.entered.append(wanted)
        before, made.current_device = made.current_device, -1
        yield
        made.current_device = before

    monkeypatch.setattr(fused_experts, "make_plan", counted)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(driver, "current_device", lambda: made.current_device)
    # A spec for the CPU, prepared as one for CUDA is; not remembered beyond the test.
    monkeypatch.setattr(ops.launch, "CpuExperts", launch_cuda.CudaExperts)
    for name in ("_prepared", "_prepared_moe"):
        monkeypatch.setattr(ops, name, getattr(ops, name).__wrapped__)
    monkeypatch.setattr(ops, "_experts_sites", CallSites())
    monkeypatch.setattr(ops, "_moe_sites", CallSites())
    return made


def test_a_call_is_planned_once(roads: Roads) -> None:
    tensors = _tensors()
    expected = reference.experts(*tensors, **NUMBERS)
    for values in (1.0, 2.0, 3.0):
        changed = [tensors[0] * values, tensors[1].clone(), tensors[2] / values, *tensors[3:]]
        actual = roads.experts(changed)
        if values == 1.0:
            torch.testing.assert_close(actual, expected)
    assert roads.num_plans == 1


def test_weights_are_known_by_address(roads: Roads) -> None:
    tensors = _tensors()
    roads.experts(tensors)
    roads.experts([one if one is None else one.view_as(one) for one in tensors])
    assert roads.num_plans == 1
    for index in (3, 4, 5):
        moved = list(tensors)
        moved[index] = tensors[index].clone()
        torch.testing.assert_close(roads.experts(moved), roads.experts(tensors))
    assert roads.num_plans == 4


def _with_x_at(offset_bytes: int) -> Tensor:
    room = torch.zeros(3 * 16 + 64)
    start = (-room.data_ptr() % 64 + offset_bytes) // 4
    return room[start : start + 3 * 16].view(3, 16)


_BASE = _tensors(x=_with_x_at(0))
_KEPT = dict(zip(NAMES, _BASE, strict=True))
OTHER_SITES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"x": torch.randn(1, 16), "ids": torch.zeros(1, 2, dtype=torch.int64), "weights": torch.rand(1, 2)}, {}),
    "rows of x": ({"x": torch.randn(3, 24)[:, :16]}, {}),
    "alignment of x": ({"x": _with_x_at(4)}, {}),
    "id dtype": ({"ids": _KEPT["ids"].int()}, {}),
    "id strides": ({"ids": _KEPT["ids"].t().contiguous().t()}, {}),
    "weight dtype": ({"weights": _KEPT["weights"].bfloat16()}, {}),
    "choices": ({"ids": torch.zeros(3, 1, dtype=torch.int64), "weights": torch.rand(3, 1)}, {}),
    "gate_up strides": ({"gate_up": _KEPT["gate_up"].as_strided((4, 16, 16), (256, 1, 16))}, {}),
    "down strides": ({"down": _KEPT["down"].as_strided((4, 16, 8), (128, 1, 16))}, {}),
    "no bias": ({"gate_up_bias": None}, {}),
    "other bias": ({"down_bias": torch.randn(4, 16)}, {}),
    "gate layout": ({}, {"gate_layout": "interleaved"}),
    "activation": ({}, {"activation": "silu", "activation_params": []}),
    "activation parameter": ({}, {"activation_params": [1.5, 6.0]}),
    "weight on": ({}, {"weight_on": "input"}),
    "experts of other ranks": ({}, {"num_experts": 5}),
    "offset": ({}, {"num_experts": 5, "expert_offset": 1}),
}


@pytest.mark.parametrize(("tensors", "numbers"), OTHER_SITES.values(), ids=OTHER_SITES)
def test_other_calls_have_plans_of_their_own(roads: Roads, tensors: dict[str, Any], numbers: dict[str, Any]) -> None:
    changed = list({**_KEPT, **tensors}.values())
    roads.experts(_BASE)
    actual = roads.experts(changed, **numbers)
    assert roads.num_plans == 2
    roads.experts(_BASE)
    roads.experts(changed, **numbers)
    assert roads.num_plans == 2
    in_full = in_order(ops._EXPERTS_NUMBERS, {**NUMBERS, **numbers})
    assert torch.equal(actual, grouped.forward(*changed, ops.experts_spec(tuple(in_full))))


def test_what_is_not_legal_is_refused_each_time_and_not_kept(roads: Roads) -> None:
    tensors = _tensors()
    roads.experts(tensors)
    for _ in range(2):
        with pytest.raises(UnsupportedMoE, match="ids must have one row per token, T=3 as x has, got 2"):
            roads.experts([tensors[0], tensors[1][:2], *tensors[2:]])
        with pytest.raises(UnsupportedMoE, match="a token can choose at most"):
            roads.experts(tensors, num_experts=1)
    assert roads.num_plans == 1


def test_a_refusal_inside_a_capture_is_not_kept(roads: Roads, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan = fused_experts.make_plan

    def refuse(*args: Any) -> Any:
        raise LaunchError("call once before capturing")

    tensors = _tensors()
    monkeypatch.setattr(fused_experts, "make_plan", refuse)
    with pytest.raises(LaunchError):
        roads.experts(tensors)
    monkeypatch.setattr(fused_experts, "make_plan", make_plan)
    assert roads.experts(tensors).shape == (3, 16)


def test_router_and_experts_are_one_site(roads: Roads) -> None:
    x, _, _, *experts = _tensors()
    tensors = [x, torch.randn(4, 16), torch.randn(4), None, *experts]
    expected = reference.moe(*tensors, **ROUTER_NUMBERS, **NUMBERS)
    for _ in range(2):
        torch.testing.assert_close(roads.moe(tensors), expected)
    assert roads.num_plans == 1
    moved = tensors[1].clone()
    other: list[Callable[[], Tensor]] = [
        lambda: roads.moe(tensors, top_k=1),
        lambda: roads.moe(tensors, renormalize=False),
        lambda: roads.moe(tensors, score_dtype=torch.float64),
        lambda: roads.moe([x, moved, *tensors[2:]]),
        lambda: roads.moe([*tensors[:2], None, *tensors[3:]]),
        lambda: roads.moe([x[:2], *tensors[1:]]),
    ]
    for number, call in enumerate(other, start=2):
        torch.testing.assert_close(call(), call())
        assert roads.num_plans == number
    with pytest.raises(UnsupportedMoE, match="top_k must lie in"):
        roads.moe(tensors, top_k=5)


@pytest.mark.parametrize("op", ["experts", "moe"])
def test_calls_run_with_the_device_of_their_tensors(roads: Roads, op: str) -> None:
    tensors = _tensors()
    if op == "moe":
        tensors[1:3] = [torch.randn(4, 16), None, None]
    call = getattr(roads, op)
    expected = call(tensors)
    planned = len(roads.entered)
    assert torch.equal(call(tensors), expected)
    assert len(roads.entered) == planned, "the current device must not be entered again"
    roads.current_device = 3
    assert torch.equal(call(tensors), expected)
    assert roads.entered[planned:] == [torch.device("cpu")] and roads.current_device == 3


def test_the_oldest_plan_goes_first() -> None:
    sites: CallSites[int] = CallSites(capacity=2)
    for number in (1, 2, 1, 3):
        sites.add((number,), lambda number=number: number)
    assert [sites.find((number,)) for number in (1, 2, 3)] == [None, 2, 3]


def test_a_plan_from_before_forgetting_is_not_kept() -> None:
    """A thread that planned with old timings while another recorded new ones would keep its plan for good."""
    sites: CallSites[str] = CallSites()

    def make() -> str:
        sites.forget()  # as another thread that has tuned
        return "old"

    assert sites.add(("site",), make) == "old"
    assert sites.find(("site",)) is None
    assert sites.add(("site",), lambda: "new") == sites.find(("site",)) == "new"


def test_many_threads_may_plan_at_once() -> None:
    sites: CallSites[int] = CallSites(capacity=10)
    start = threading.Barrier(8)
    wrong: list[object] = []

    def work(thread: int) -> None:
        start.wait()
        for turn in range(2000):
            number = (turn * 7 + thread) % 40
            found = sites.find((number,))
            if found not in (None, number):
                wrong.append(found)
            sites.add((number,), lambda number=number: number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(sites._plans) == 10


@pytest.mark.parametrize(("op", "specs"), [("experts", (ExpertsSpec,)), ("moe", (RoutingSpec, ExpertsSpec))])
def test_the_numbers_are_the_fields_of_the_specs(op: str, specs: Any) -> None:
    arguments = getattr(torch.ops.perseus, op).default._schema.arguments
    numbers = [one for one in arguments if "Tensor" not in str(one.type)]
    assert arguments[-len(numbers) :] == numbers
    fields = {field.name: field.default for spec in specs for field in dataclasses.fields(spec)}
    fields |= dict.fromkeys(default_dtypes(torch.float32), None) if op == "moe" else {}
    assert {one.name for one in numbers} == set(fields)
    for one in numbers:
        default = fields[one.name]
        assert one.has_default_value() == (default is not dataclasses.MISSING), one.name
        assert not one.has_default_value() or one.default_value == (list(default) if default == () else default)
    assert not any(one.kwarg_only for one in arguments), "costs .4 us each"


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_the_router_may_be_left_out(x_dtype: torch.dtype) -> None:
    spec = RoutingSpec(top_k=2, renormalize=True, **default_dtypes(x_dtype))
    assert op_arguments(spec, x_dtype) == {"top_k": 2, "renormalize": True}
    written = dataclasses.replace(spec, score_dtype=torch.float64, weights_dtype=torch.bfloat16)
    assert op_arguments(written, x_dtype).keys() == {"top_k", "renormalize", "score_dtype", "weights_dtype"}
    tensors = [None if one is None else one.to(x_dtype) if one.is_floating_point() else one for one in _tensors()]
    x_TD, experts = tensors[0], tensors[3:]
    router_ED = torch.randn(4, 16, dtype=x_dtype)
    call = functools.partial(torch.ops.perseus.moe, x_TD, router_ED, None, None, *experts, num_experts=4)
    assert torch.equal(call(**op_arguments(spec, x_dtype)), call(**spec.as_kwargs()))


def test_both_ops_have_the_numbers_of_the_experts_in_one_order() -> None:
    fields = ExpertsSpec.__dataclass_fields__
    assert tuple(name for name in ops._MOE_NUMBERS if name in fields) == ops._EXPERTS_NUMBERS


@pytest.mark.parametrize("written", [NUMBERS, {"num_experts": 4}])
def test_defaults_may_be_written_or_not(written: dict[str, Any]) -> None:
    spec = ExpertsSpec(**{**written, "activation_params": tuple(written.get("activation_params", ()))})
    needed = {name: value for name, value in written.items() if name not in UNCHANGED}
    assert op_arguments(spec, torch.float32) == needed
    tensors = _tensors()
    op = torch.ops.perseus.experts
    assert torch.equal(op(*tensors, **op_arguments(spec, torch.float32)), op(*tensors, **spec.as_kwargs()))


def test_sites_hold_no_tensor() -> None:
    tensors = _tensors()
    numbers = ("silu", (1.5, 7.0), 4)
    site = experts_site(numbers, *tensors)
    assert hash(site) == hash(experts_site(numbers, *tensors))

    def parts(value: object) -> list[object]:
        return [part for one in value for part in parts(one)] if isinstance(value, tuple) else [value]

    assert not any(isinstance(part, Tensor) for part in parts(site))
