"""How does a router's part after the logits run on CUDA? One launch instead of five; covers float32 scores.

The logits stay a torch GEMM. The same choices as ``routing.route`` but for exactly equal scores, where torch.topk on
CUDA takes any and this takes the lower expert; weights agree to float32 rounding. Choices fall in score.

Axes: T tokens, K choices per token, E experts.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from perseus_compile import _C
from perseus_compile.facts import RoutingSpec
from perseus_compile.jit import abi, compiler, driver

_ROUTINGS = ("softmax_topk", "topk_softmax", "sigmoid_topk")  # in the order of enum Routing
_MAX_TOP_K = 32
MAX_EXPERTS = 1024
_MAX_GROUPS = 32
_TOKENS_PER_CTA = 4
_BASES = ("logits", "ids", "weights")  # what a launch brings, in this order


def why_not(logits_TE: Tensor, correction_bias_E: Tensor | None, spec: RoutingSpec) -> str | None:
    """Why the routing kernel cannot run this call; None: it can."""
    if logits_TE.device.type != "cuda":
        return f"the routing kernel needs logits on a CUDA device, got {logits_TE.device}"
    if logits_TE.dtype not in (torch.float32, torch.bfloat16) or not logits_TE.is_contiguous():
        return f"logits must be contiguous and float32 or bfloat16, got {logits_TE.dtype}, strides {logits_TE.stride()}"
    if spec.top_k > _MAX_TOP_K or logits_TE.shape[1] > MAX_EXPERTS or spec.num_groups > _MAX_GROUPS:
        return f"at most {_MAX_TOP_K} choices, {MAX_EXPERTS} experts and {_MAX_GROUPS} groups, got {spec}"
    if spec.weights_dtype not in (torch.float32, torch.bfloat16):
        return f"weights must be float32 or bfloat16, got {spec.weights_dtype}"
    rounds_once = (
        spec.routing == "topk_softmax"
        and logits_TE.dtype == spec.score_dtype == spec.weights_dtype
        and not spec.renormalize
    )
    if spec.score_dtype != torch.float32 and not rounds_once:
        return f"scores must be float32, got {spec.score_dtype}"
    if correction_bias_E is not None and (
        correction_bias_E.dtype != torch.float32 or not correction_bias_E.is_contiguous()
    ):
        return f"the correction bias must be contiguous float32, got {correction_bias_E.dtype}"
    return None


def experts_of_a_lane(num_experts: int) -> int:
    """Which kernel so many experts take: a power of two, in 32 lanes."""
    return 1 << (-(-num_experts // 32) - 1).bit_length()


def kernel_source(experts_per_lane: int) -> str:
    """Of the routing kernel for up to 32 * ``experts_per_lane`` experts."""
    num_bytes = ctypes.sizeof(abi.RouteKernelParams)
    return (
        f"#define PERSEUS_EXPERTS_PER_LANE {experts_per_lane}\n"
        '#include "perseus/routing/route.cuh"\n'
        f'static_assert(sizeof(perseus::RouteKernelParams) == {num_bytes}, "as in abi.py");\n'
    )


_kernels: dict[tuple[int, int], driver.Kernel | None] = {}


def _kernel(experts_per_lane: int, device_index: int) -> driver.Kernel | None:
    """The loaded kernel; None, with a warning, where it cannot be built or loaded (``driver.load_once``).

    Raises:
        LaunchError: it is not loaded and the current stream is being captured.
    """

    def load() -> driver.Kernel:
        return _load(experts_per_lane, device_index)

    return driver.load_once(_kernels, (experts_per_lane, device_index), load, "routers that need it run as torch ops")


def _load(experts_per_lane: int, device_index: int) -> driver.Kernel:
    arch = "sm_" + "".join(map(str, torch.cuda.get_device_capability(device_index)))
    image = compiler.build_source(kernel_source(experts_per_lane), arch)
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        return driver.Kernel(image, "perseus_route")


def route_params(
    spec: RoutingSpec,
    num_tokens: int,
    num_experts: int,
    logits_dtype: torch.dtype,
    correction_bias_E: Tensor | None,
) -> abi.RouteParams:
    """All that a kernel must know of a router after the logits but the addresses of logits, ids and weights."""
    return abi.RouteParams(
        correction_bias=0 if correction_bias_E is None else correction_bias_E.data_ptr(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=spec.top_k,
        routing=_ROUTINGS.index(spec.routing),
        logits_are_bf16=logits_dtype == torch.bfloat16,
        renormalize=spec.renormalize,
        round_to_bf16=spec.weights_dtype == torch.bfloat16,
        num_groups=spec.num_groups,
        topk_groups=spec.topk_groups,
        renormalize_eps=spec.renormalize_eps,
        scale=spec.routing_scale,
    )


class Route(NamedTuple):
    """A call site of the routing kernel: launches that lack nothing but the addresses."""

    launcher: _C.KernelLauncher | None  # None: there is no token
    shape_TK: tuple[int, int]
    device: torch.device

    def empty(self) -> tuple[Tensor, Tensor]:
        """Room for the weights float32 [T, K] and the ids int32 [T, K]."""
        weights_TK = torch.empty(self.shape_TK, dtype=torch.float32, device=self.device)
        return weights_TK, torch.empty(self.shape_TK, dtype=torch.int32, device=self.device)

    def run(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, K], rounded as the spec says, and ids int32 [T, K].

        The device of the logits must be the current one.

        Raises:
            LaunchError: the driver refuses the launch.
        """
        weights_TK, ids_TK = self.empty()
        if self.launcher is not None:
            stream = driver.current_stream(self.device.index)
            self.launcher.launch(stream, logits_TE.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr())
        return weights_TK, ids_TK


def plan_route(logits_TE: Tensor, correction_bias_E: Tensor | None, spec: RoutingSpec) -> Route | None:
    """How logits like these are routed; None where ``why_not`` has a reason. Reads no value.

    Good for as long as the correction bias stays where it is. The device of the logits must be the current one.

    Raises:
        LaunchError: the first call of a kernel comes inside a graph capture.
    """
    if why_not(logits_TE, correction_bias_E, spec) is not None:
        return None
    num_tokens, num_experts = logits_TE.shape
    shape_TK = (num_tokens, spec.top_k)
    if num_tokens == 0:
        return Route(None, shape_TK, logits_TE.device)
    kernel = _kernel(experts_of_a_lane(num_experts), logits_TE.device.index)
    if kernel is None:
        return None
    route = route_params(spec, num_tokens, num_experts, logits_TE.dtype, correction_bias_E)
    launcher = kernel.launcher(
        abi.RouteKernelParams(route=route),
        bases=_BASES,
        moving={name: driver.Place(name, 0) for name in _BASES},
        grid=-(-num_tokens // _TOKENS_PER_CTA),
        threads=32 * _TOKENS_PER_CTA,
    )
    return Route(launcher, shape_TK, logits_TE.device)


def route_logits(
    logits_TE: Tensor, correction_bias_E: Tensor | None, spec: RoutingSpec
) -> tuple[Tensor, Tensor] | None:
    """Plans one call and runs it; None where the kernel cannot (``why_not``). The ops keep their plans."""
    route = plan_route(logits_TE, correction_bias_E, spec)
    return None if route is None else route.run(logits_TE)
