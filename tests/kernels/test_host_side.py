"""Is what Python does around a launch right: addresses, locks, devices, captures, errors? The driver is faked."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import types
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver

import perseus_compile
from perseus_compile import _C, cuda_plan, fused_experts, fused_moe, fused_router, launch_cuda, routing
from perseus_compile.errors import BuildError, LaunchError, PeerTimeout
from perseus_compile.facts import ExpertsSpec, RoutingSpec
from perseus_compile.jit import abi, driver, moe_kernel
from perseus_compile.jit.spec import spec_for

SPEC = ExpertsSpec(
    weight_layout="out_in",
    gate_layout="concatenated",
    activation="silu",
    activation_params=(),
    weight_on="output",
    num_experts=4,
    expert_offset=0,
)
ROUTING = RoutingSpec(
    routing="softmax_topk",
    top_k=2,
    router_dtype=torch.float32,
    score_dtype=torch.float32,
    weights_dtype=torch.float32,
)


def _call(num_tokens: int = 3, num_experts: int = 4, top_k: int = 2) -> tuple[Any, ...]:
    """Arguments of the experts in schema order, on the CPU."""
    return (
        torch.zeros(num_tokens, 16, dtype=torch.bfloat16),
        torch.zeros(num_tokens, top_k, dtype=torch.int64),
        torch.zeros(num_tokens, top_k),
        torch.zeros(num_experts, 16, 16, dtype=torch.bfloat16),
        None,
        torch.zeros(num_experts, 16, 8, dtype=torch.bfloat16),
        None,
    )


@pytest.fixture
def blocks(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> moe_kernel._ControlBlocks:
    """Those of the device that CPU tensors have, -1."""
    fake.reset(abi.MoeParams, num_maps=3)
    made = moe_kernel._ControlBlocks.__new__(moe_kernel._ControlBlocks)
    made.words = torch.zeros(2, moe_kernel._CONTROL_STRIDE_WORDS, dtype=torch.int32)
    made.error = torch.zeros(ctypes.sizeof(abi.ErrorRecord) // 4, dtype=torch.int32)
    _C.ControlBlocks.__init__(
        made,
        words=made.words.data_ptr(),
        stride_bytes=made.words.stride(0) * 4,
        capacity=2,
        error=made.error.data_ptr(),
        driver=fake.path,
    )
    monkeypatch.setattr(moe_kernel, "_blocks_of_device", {-1: made})
    return made


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes by address of what is allocated and not given back; the peak is under 0."""
    held: dict[int, int] = {0: 0}

    def allocate(num_bytes: int, stream: int) -> int:
        held[0] = max(held[0], num_bytes)
        held[1 << 40] = num_bytes
        return 1 << 40

    monkeypatch.setattr(driver, "allocate", allocate)
    monkeypatch.setattr(driver, "free", held.pop)
    return held


@pytest.fixture
def kernel(
    fake: FakeDriver, blocks: moe_kernel._ControlBlocks, memory: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> moe_kernel.MoeKernel:
    """A kernel whose launches go to the fake driver."""
    made: Any = object.__new__(moe_kernel.MoeKernel)
    made.in_out, made.paired, made.hidden_box_rows, made.routes = 0, 0, 8, 0
    made.max_tokens, made.out_per_tile, made.hidden_per_tile = 8, 128, 64
    made.device_index, made.num_sms, made.threads, made.shared_bytes = -1, 132, 256, 1000
    made._kernel = object.__new__(driver.Kernel)
    made._kernel._function, made._kernel._context = ctypes.c_void_p(0xF00), ctypes.c_void_p(0xC00)
    monkeypatch.setattr(driver, "LIBRARY", fake.path)
    monkeypatch.setattr(driver, "current_stream", lambda device_index: 7)
    return made  # type: ignore[no-any-return]


def test_a_launch_gets_the_tensors_of_its_call(
    kernel: moe_kernel.MoeKernel, blocks: moe_kernel._ControlBlocks, fake: FakeDriver
) -> None:
    x, ids, weights, gate_up, _, down, _ = args = _call()
    bias = torch.zeros(4, 16, dtype=torch.bfloat16)
    prepared = kernel.prepare(*args[:4], bias, *args[5:], SPEC, deadline_ns=5)
    layout = prepared.layout
    workspace = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    out = prepared.run(x, ids, weights, workspace)
    assert (out.shape, out.dtype, out.stride()) == (x.shape, x.dtype, (16, 1))
    (launch,) = fake.launches
    assert (launch.function, launch.stream, launch.shared_bytes) == (0xF00, 7, 1000)
    assert (list(launch.grid), list(launch.block)) == ([132, 1, 1], [256, 1, 1])
    params = launch.read_params(abi.MoeParams)
    tensors = {"x": x, "ids": ids, "weights": weights, "gate_up_bias": bias, "out": out}
    assert {name: getattr(params, name) for name in tensors} == {name: one.data_ptr() for name, one in tensors.items()}
    assert (params.down_bias, params.error, params.control) == (0, blocks.error.data_ptr(), blocks.words.data_ptr())
    offsets = {name: getattr(params, name) - workspace.data_ptr() for name in layout.offsets()}
    assert offsets == layout.offsets() and len(set(offsets.values())) == 7  # the arrays of a router are empty
    assert (params.num_tokens, params.top_k, params.num_local_experts, params.deadline_ns) == (3, 2, 4, 5)
    assert (params.model_width, params.expert_width, params.ids_are_i64, params.weights_are_bf16) == (16, 8, 1, 0)
    addresses = [one.address for one in launch.maps[:3]]
    assert addresses == [gate_up.data_ptr(), down.data_ptr(), workspace.data_ptr() + layout.hidden]
    assert (tuple(launch.maps[2].sizes[:2]), tuple(launch.maps[2].box[:2])) == ((8, 6), (64, 8))


def test_every_address_of_the_parameters_is_set(kernel: moe_kernel.MoeKernel, fake: FakeDriver) -> None:
    args = _call()
    biases = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.bfloat16)
    route = abi.RouteParams(num_tokens=3, num_experts=4, top_k=2)
    router = moe_kernel.LaunchRouter(torch.zeros(4, 24, dtype=torch.bfloat16)[:, :16], biases[1], route)
    kernel.routes = 1
    x, ids, weights, gate_up, _, down, _ = args
    prepared = kernel.prepare(x, ids.int(), weights, gate_up, biases[0], down, biases[1], SPEC, router=router)
    prepared.run(args[0], None, None)
    params = fake.launches[0].read_params(abi.MoeParams)
    assert all(getattr(params, name) for name in abi._ADDRESSES)
    assert (params.ids, params.weights) == (params.routed_ids, params.routed_weights)
    assert (params.router_row_elements, params.route.num_experts) == (24, 4)


def test_the_workspace_is_given_back(
    kernel: moe_kernel.MoeKernel, memory: dict[int, int], blocks: moe_kernel._ControlBlocks, fake: FakeDriver
) -> None:
    args = _call()
    prepared = kernel.prepare(*args, SPEC)
    prepared.run(*args[:3])
    assert fake.launches[0].read_params(abi.MoeParams).hidden == 1 << 40
    assert memory == {0: prepared.layout.total_bytes}
    fake.fail(launch=700)
    with pytest.raises(LaunchError, match="CUDA error 700"):
        prepared.run(*args[:3])
    fake.fail()
    blocks.error.copy_(torch.tensor([3, 5, 1, 2, 1, 3], dtype=torch.int32))
    with pytest.raises(PeerTimeout, match=r"got 1 of 3 arrivals .* hidden rows .*\(CTA 5, expert 1, tile 2\)"):
        prepared.run(*args[:3])
    assert memory == {0: prepared.layout.total_bytes} and len(fake.launches) == 1
    prepared.run(*args[:3])  # the record is cleared
    assert len(fake.launches) == 2


def test_check_finds_the_launch_that_ran_out_of_time(blocks: moe_kernel._ControlBlocks) -> None:
    perseus_compile.check()
    blocks.error.copy_(torch.tensor([2, 5, 0, 0, 1, 3], dtype=torch.int32))
    with pytest.raises(PeerTimeout, match=r"got 1 of 3 arrivals .* sorting rows \(CTA 5.*run again"):
        perseus_compile.check()
    perseus_compile.check()  # the record is cleared


def test_check_without_a_launch_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_kernel, "_blocks_of_device", {})
    perseus_compile.check()


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (3, 0, 2), (3, 4, 0), (0, 0, 0)])
def test_nothing_to_do_gives_zeros(num_tokens: int, num_experts: int, top_k: int) -> None:
    out = fused_experts.run_experts(*_call(num_tokens, num_experts, top_k), SPEC)
    assert out is not None and out.shape == (num_tokens, 16) and out.dtype == torch.bfloat16
    assert out.count_nonzero() == 0


def test_first_use_inside_a_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(fused_experts, "_kernels", {})
    monkeypatch.setattr(fused_router, "_kernels", {})
    monkeypatch.setattr(moe_kernel, "_blocks_of_device", {})
    variant = spec_for("few8", weight_layout="out_in", gate_layout="concatenated", activation="silu")
    advice = "call once with this token count before capturing"
    with pytest.raises(LaunchError, match=advice):
        fused_experts.kernel_for(variant, 0)
    with pytest.raises(LaunchError, match=advice):
        fused_router._kernel(1, 0)
    with pytest.raises(LaunchError, match=advice):
        moe_kernel.control_blocks(0)
    assert fused_experts._kernels == fused_router._kernels == {}, "a refusal must not be remembered"
    monkeypatch.setattr(fused_experts, "_kernels", {(variant, 0): None})
    assert fused_experts.kernel_for(variant, 0) is None  # known already: nothing to load


@pytest.mark.parametrize(("error", "num_tries"), [(BuildError("no compiler"), 1), (LaunchError("out of memory"), 2)])
def test_what_cannot_be_built_is_not_tried_again_and_what_the_driver_refuses_is(
    error: Exception, num_tries: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels: dict[str, object | None] = {}
    tries = []

    def load() -> object:
        tries.append(1)
        raise error

    for _ in range(2):
        assert driver.load_once(kernels, "variant", load, "layers run on the plain path") is None
    assert len(tries) == num_tries
    assert [record.getMessage() for record in caplog.records] == [f"{error}; layers run on the plain path"] * num_tries


def test_router_casts_its_bias_and_computes_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(routing.F, "linear", lambda *args: calls.append(1) or linear(*args))  # type: ignore[func-returns-value]
    x, weight, bias = torch.randn(5, 16), torch.randn(4, 16).bfloat16(), torch.randn(4).bfloat16()
    router, *_ = launch_cuda.CudaRouter.plan(ROUTING, x, weight, None)
    weights, ids = router.run(x, weight, bias, None)
    assert len(calls) == 1
    expected = routing.route(x, weight, bias, None, **ROUTING.as_kwargs())
    assert torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])


BF16_ROUTING = dataclasses.replace(ROUTING, router_dtype=torch.bfloat16)


def _router(num_experts: int = 4) -> fused_moe.Router:
    return fused_moe.Router(torch.zeros(num_experts, 16, dtype=torch.bfloat16), None, None, BF16_ROUTING)


def _plan(tiles: str) -> cuda_plan.CudaPlan:
    return cuda_plan.CudaPlan(
        path="fused", tiles=tiles, column_groups=1, predicted_ms=1.0, source="model", reason="as the test wants"
    )


def test_a_layer_whose_router_is_covered_is_one_launch(
    kernel: moe_kernel.MoeKernel, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    kernel.routes = 1
    monkeypatch.setattr(fused_experts, "why_not", lambda *args: None)
    monkeypatch.setattr(fused_router, "why_not", lambda *args: None)
    monkeypatch.setattr(fused_experts, "kernel_for", lambda variant, device: wanted.append(variant) or kernel)  # type: ignore[func-returns-value]
    monkeypatch.setattr(cuda_plan, "plan_of_call", lambda *args, **options: _plan("few16"))
    monkeypatch.setattr(torch.cuda, "device", lambda wanted: contextlib.nullcontext())
    monkeypatch.setattr(driver, "current_device", lambda: -1)
    experts = launch_cuda.CudaExperts(types.SimpleNamespace(experts=SPEC))  # type: ignore[arg-type]
    x, _, _, *expert_tensors = _call()
    router = _router()
    tensors = (x, router.weight_ED, None, None, *expert_tensors)
    call = launch_cuda.CudaMoe.plan(BF16_ROUTING, experts, *tensors)
    assert [variant.routes for variant in wanted] == [True]
    for _ in range(2):
        assert call.forward(*tensors).shape == x.shape
    first, second = (launch.read_params(abi.MoeParams) for launch in fake.launches)
    assert first.router_weight == second.router_weight == router.weight_ED.data_ptr()
    assert first.ids == first.routed_ids and first.weights == first.routed_weights and first.ids != first.weights


def test_a_router_in_the_launch_does_not_ask_for_the_default_dtype(
    kernel: moe_kernel.MoeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that the launch writes and reads are float32; a stand-in in torch's default dtype said otherwise."""
    kernel.routes = 1
    wanted = []
    prepare = kernel.prepare
    monkeypatch.setattr(kernel, "prepare", lambda *args, **more: wanted.append(args[1:3]) or prepare(*args, **more))
    monkeypatch.setattr(fused_experts, "why_not", lambda *args: None)
    monkeypatch.setattr(fused_router, "why_not", lambda *args: None)
    monkeypatch.setattr(fused_experts, "kernel_for", lambda variant, device: kernel)
    monkeypatch.setattr(cuda_plan, "plan_of_call", lambda *args, **options: _plan("few16"))
    x, _, _, *expert_tensors = _call()
    for dtype in (torch.bfloat16, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            plan = fused_moe.make_plan(_router(), x, tuple(expert_tensors), SPEC)
        finally:
            torch.set_default_dtype(before)
        assert plan.reason is None
    assert [(ids.dtype, weights.dtype) for ids, weights in wanted] == [(torch.int32, torch.float32)] * 2


def test_a_router_in_the_launch_is_for_few_tokens_in_tiles_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_experts, "why_not", lambda *args: None)
    monkeypatch.setattr(fused_router, "why_not", lambda *args: None)
    monkeypatch.setattr(cuda_plan, "plan_of_call", lambda *args, **options: _plan(cuda_plan.LAST_TILES))
    for num_tokens, num_experts, reason in ((9, 4, "launches of its own are faster"), (8, 1, "tiles for many rows")):
        x, _, _, *expert_tensors = _call(num_tokens, num_experts)
        router = fused_moe.Router(*_router(num_experts)[:3], dataclasses.replace(BF16_ROUTING, top_k=8))
        assert reason in str(fused_moe.make_plan(router, x, tuple(expert_tensors), SPEC).reason)


def test_routers_that_the_launch_does_not_cover_say_why() -> None:
    x, router = _call()[0], _router()
    odd = torch.zeros(4, 20, dtype=torch.bfloat16)[:, 4:]
    strided_bias = torch.zeros(8, dtype=torch.bfloat16)[::2]
    float32 = dataclasses.replace(BF16_ROUTING, router_dtype=torch.float32)
    for changed, reason in (
        (router._replace(spec=float32), "got router_dtype of torch.float32"),
        (router._replace(weight_ED=router.weight_ED.float()), "got router_weight of torch.float32"),
        (router._replace(bias_E=torch.zeros(4)), "got router_bias of torch.float32"),
        (router._replace(weight_ED=odd), "rows on 16-byte boundaries"),
        (router._replace(weight_ED=router.weight_ED.mT.contiguous().mT), "a contiguous last axis"),
        (router._replace(bias_E=strided_bias), "router_bias must be contiguous"),
        (router, "a CUDA device"),
    ):
        assert reason in str(fused_moe.why_not(changed, x))


def test_scores_that_round_more_than_once_are_not_covered() -> None:
    numbers = {**ROUTING.as_kwargs(), "routing": "topk_softmax"}
    spec = RoutingSpec(**{**numbers, "score_dtype": torch.bfloat16, "weights_dtype": torch.bfloat16})

    def reason(dtype: torch.dtype) -> str | None:
        logits: Any = types.SimpleNamespace(
            device=torch.device("cuda", 0),
            dtype=dtype,
            shape=(2, 8),
            is_contiguous=lambda: True,
            stride=lambda: (8, 1),
        )
        return fused_router.why_not(logits, None, spec)

    assert reason(torch.bfloat16) is None
    assert "scores must be float32" in str(reason(torch.float32))


def test_driver_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: types.SimpleNamespace(cuGetErrorString=lambda *args: 1))
    with pytest.raises(
        LaunchError, match=r"launching must succeed, got CUDA error 700 .*; look for the first CUDA error"
    ):
        driver._check(700, "launching")
