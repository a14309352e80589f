"""Is what Python does around a launch right: addresses, locks, devices, captures, errors? The driver is faked."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import perseus_compile
from perseus_compile import fused_experts, fused_router, launch_cuda, routing
from perseus_compile.errors import LaunchError, PeerTimeout
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


def _blocks() -> moe_kernel._ControlBlocks:
    blocks = object.__new__(moe_kernel._ControlBlocks)
    blocks.words = torch.zeros(moe_kernel._MAX_CONTROL_BLOCKS, 1, dtype=torch.int32)
    blocks._of_stream = {}
    blocks._lock = threading.Lock()
    blocks.error = torch.zeros(ctypes.sizeof(abi.ErrorRecord) // 4, dtype=torch.int32)
    blocks.error_phase = ctypes.c_uint32.from_address(blocks.error.data_ptr())
    return blocks


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
def blocks(monkeypatch: pytest.MonkeyPatch) -> moe_kernel._ControlBlocks:
    made = _blocks()
    monkeypatch.setattr(moe_kernel, "_blocks_of_device", {0: made})
    monkeypatch.setattr(driver, "capture_id", lambda stream: 0)
    return made


@pytest.fixture
def kernel(blocks: moe_kernel._ControlBlocks, monkeypatch: pytest.MonkeyPatch) -> moe_kernel.MoeKernel:
    """A kernel whose launches only note their arguments, in ``kernel.launches``."""
    made: Any = object.__new__(moe_kernel.MoeKernel)
    made.in_out, made.paired, made.hidden_box_rows = 0, 0, 8
    made.max_tokens, made.out_per_tile, made.hidden_per_tile = 8, 128, 64
    made.device_index, made.num_sms, made.threads, made.shared_bytes = 0, 1, 128, 0
    made._hidden_maps, made._weight_maps = {}, {}
    made.launches = []
    made._kernel = types.SimpleNamespace(launch=lambda *args: made.launches.append(list(args[-1])))
    monkeypatch.setattr(driver, "encode_tensor_map", lambda *numbers: driver.AlignedBuffer())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: types.SimpleNamespace(cuda_stream=7))
    return made  # type: ignore[no-any-return]


def _workspace(layout: abi.WorkspaceLayout) -> Tensor:
    return torch.zeros(layout.total_bytes, dtype=torch.uint8)


def test_a_call_site_keeps_its_tensor_maps_alive(kernel: moe_kernel.MoeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_kernel, "_MAX_HIDDEN_MAPS", 1)
    args = _call()
    first, second = (kernel.prepare(*args, SPEC) for _ in range(2))
    memory = _workspace(first.layout), _workspace(second.layout)
    kernel.run(first, *args[:3], memory[0])
    assert first.hidden_map is not None
    alive = weakref.ref(first.hidden_map)
    kernel.run(second, *args[:3], memory[1])  # the kernel forgets the map of `first`
    kernel._weight_maps.clear()
    assert len(kernel._hidden_maps) == 1 and alive() is not None
    kernel.run(first, *args[:3], memory[0])  # same workspace: the map is not encoded again
    launches: list[list[int]] = kernel.launches  # type: ignore[attr-defined]
    assert launches[2] == launches[0] and launches[0][3] == first.hidden_map.address
    assert launches[0][1:3] == [one.address for one in first.weight_maps]


def test_a_map_that_fails_is_not_taken_for_encoded(
    kernel: moe_kernel.MoeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _call()
    prepared = kernel.prepare(*args, SPEC)
    memory = _workspace(prepared.layout)

    def refuse(*numbers: object) -> driver.AlignedBuffer:
        raise LaunchError("no")

    monkeypatch.setattr(driver, "encode_tensor_map", refuse)
    for _ in range(2):
        with pytest.raises(LaunchError):
            kernel.run(prepared, *args[:3], memory)
    assert kernel.launches == []  # type: ignore[attr-defined]


class _SlowCount(dict[tuple[int, int], int]):
    """Gives another thread its turn between counting and using the count."""

    def __len__(self) -> int:
        count = super().__len__()
        time.sleep(1e-5)
        return count


def test_new_streams_of_many_threads_get_blocks_of_their_own(blocks: moe_kernel._ControlBlocks) -> None:
    blocks._of_stream = _SlowCount()
    start = threading.Barrier(8)
    found: list[dict[int, int]] = [{} for _ in range(8)]

    def take(thread: int) -> None:
        start.wait()
        for stream in range(100):
            own = stream if thread % 2 else 100 + stream  # four threads each ask for the same streams
            found[thread][own] = blocks.address(own)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = {pair for part in found for pair in part.items()}
    assert len(pairs) == len({address for _, address in pairs}) == blocks.num_used == 200


def test_too_many_streams_say_what_to_do(blocks: moe_kernel._ControlBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_kernel, "_MAX_CONTROL_BLOCKS", 1)
    blocks.address(1)
    with pytest.raises(LaunchError, match="re-use streams"):
        blocks.address(2)


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


def test_launches_run_with_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Any:
        entered.append(wanted.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        tensor: Any = types.SimpleNamespace(device=torch.device("cuda", index))
        with launch_cuda._device_of(tensor):
            pass
    with launch_cuda._device_of(torch.zeros(1)):
        pass
    assert entered == [1], "only the other device must be entered"


def test_router_casts_its_bias_and_computes_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(routing.F, "linear", lambda *args: calls.append(1) or linear(*args))  # type: ignore[func-returns-value]
    x, weight, bias = torch.randn(5, 16), torch.randn(4, 16).bfloat16(), torch.randn(4).bfloat16()
    weights, ids = launch_cuda.run_router(ROUTING, x, weight, bias, None)
    assert len(calls) == 1
    expected = routing.route(x, weight, bias, None, **ROUTING.as_kwargs())
    assert torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])


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
