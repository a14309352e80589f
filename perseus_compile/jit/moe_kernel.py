"""How does one call of a layer, or of its experts, become one launch? Tensors in, kernel parameters out; owns the
control words.

What does not change from call to call - numbers, weights, where in the workspace an array lies - is written once per
call site into a ``Prepared``; a call then brings the addresses of its tensors.

Axes: T tokens, K choices per token, E experts, D model width, F expert width, R routed rows (T*K).
"""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from perseus_compile import _C
from perseus_compile.errors import LaunchError, PeerTimeout
from perseus_compile.facts import ExpertsSpec
from perseus_compile.jit import abi, driver
from perseus_compile.jit.cache import default_folder
from perseus_compile.jit.driver import Place

_ENTRY = "perseus_moe_fwd"
_FACTS = "perseus_facts"
_NUM_FACTS = 10
_CONTROL_STRIDE_WORDS = 512  # more than abi.CONTROL_WORDS; blocks of two streams never share a line
_MAX_CONTROL_BLOCKS = 4096  # 8 MiB; graphs are never known to be dead, so none is given back
DEADLINE_NS = 10_000_000_000  # of one wait inside the kernel
_BASES = ("x", "ids", "weights", "out", "workspace")  # what a launch brings, in this order


class _ControlBlocks(_C.ControlBlocks):
    """The control words of a device, and the record of the first deadline that expired on it."""

    def __init__(self, device: torch.device) -> None:
        driver.refuse_in_capture()
        self.words = torch.zeros(_MAX_CONTROL_BLOCKS, _CONTROL_STRIDE_WORDS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams will use them
        self.error = torch.zeros(ctypes.sizeof(abi.ErrorRecord) // 4, dtype=torch.int32, pin_memory=True)
        super().__init__(
            words=self.words.data_ptr(),
            stride_bytes=_CONTROL_STRIDE_WORDS * 4,
            capacity=_MAX_CONTROL_BLOCKS,
            error=self.error.data_ptr(),
            driver=driver.LIBRARY,
        )


_blocks_of_device: dict[int, _ControlBlocks] = {}
_blocks_lock = threading.Lock()
_record_lock = threading.Lock()  # between reading an expired deadline and clearing it


def control_blocks(device_index: int) -> _ControlBlocks:
    """Those of a device, made on first use.

    Raises:
        LaunchError: first use, and the current stream is being captured.
    """
    found = _blocks_of_device.get(device_index)
    if found is not None:
        return found
    with _blocks_lock:
        if device_index not in _blocks_of_device:
            _blocks_of_device[device_index] = _ControlBlocks(torch.device("cuda", device_index))
        return _blocks_of_device[device_index]


class LaunchRouter(NamedTuple):
    """A router that the launch computes before its experts. ``params``: what follows the logits."""

    weight_ED: Tensor
    bias_E: Tensor | None
    params: abi.RouteParams


class Prepared:
    """One call site: launches that lack nothing but the addresses that change."""

    def __init__(self, launcher: _C.KernelLauncher, layout: abi.WorkspaceLayout, device_index: int) -> None:
        self.layout = layout
        self.launch = launcher.launch
        self._device_index, self._workspace_bytes = device_index, layout.total_bytes

    def run(
        self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None, workspace: Tensor | None = None
    ) -> Tensor:
        """The output, [T, D], fresh and contiguous; T, K and E >= 1.

        Ids and weights are None where the launch has a router. The kernel's device must be the current one.

        Raises:
            PeerTimeout: an earlier launch on this device ran into its deadline.
            LaunchError: the driver refuses the launch.
        """
        out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        stream = driver.current_stream(self._device_index)
        ids = 0 if ids_TK is None else ids_TK.data_ptr()
        weights = 0 if weights_TK is None else weights_TK.data_ptr()
        if workspace is not None:
            launched = self.launch(stream, x_TD.data_ptr(), ids, weights, out_TD.data_ptr(), workspace.data_ptr())
        else:
            address = driver.allocate(self._workspace_bytes, stream)
            try:
                launched = self.launch(stream, x_TD.data_ptr(), ids, weights, out_TD.data_ptr(), address)
            finally:
                driver.free(address)
        if not launched:
            raise_timeout(self._device_index)
            return self.run(x_TD, ids_TK, weights_TK, workspace)
        return out_TD


class MoeKernel:
    """One compiled variant, loaded on one device."""

    def __init__(self, image: bytes, device_index: int) -> None:
        with torch.cuda.device(device_index):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            self._kernel = driver.Kernel(image, _ENTRY, _FACTS, _NUM_FACTS)
        shared, threads, params, control, self.max_tokens, weight_rows, *layout = self._kernel.facts
        self.in_out, self.paired, self.hidden_box_rows, self.routes = layout
        self.shared_bytes, self.threads = shared, threads
        self.hidden_per_tile, self.out_per_tile = weight_rows // 2, weight_rows
        if (params, control) != (ctypes.sizeof(abi.MoeParams), abi.CONTROL_WORDS * 4):
            raise LaunchError(
                f"the kernel image must use structures of {ctypes.sizeof(abi.MoeParams)} and {abi.CONTROL_WORDS * 4} "
                f"bytes, got {params} and {control}; remove the files in {default_folder()}"
            )
        self._kernel.set_shared_bytes(shared)
        control_blocks(device_index)  # now: a call may come inside a capture, which this would invalidate
        self.device_index = device_index
        self.num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count

    def _gate_up_map(self, gate_up: Tensor, interleaved: bool) -> driver.TensorMap:
        experts, rows, columns = gate_up.shape
        expert_stride, row_stride = gate_up.stride(0) * 2, gate_up.stride(1) * 2
        if self.paired:
            sizes, strides, box = (columns, rows, 1, experts), (row_stride, 16, expert_stride), (64, 64, 1, 1)
        elif self.in_out:
            half = columns // 2
            sizes, strides, box = (half, rows, 2, experts), (row_stride, half * 2, expert_stride), (64, 64, 1, 1)
        else:
            half = rows // 2
            feature, plane = (2 * row_stride, row_stride) if interleaved else (row_stride, half * row_stride)
            sizes, strides = (columns, half, 2, experts), (feature, plane, expert_stride)
            box = (64, self.hidden_per_tile, 2, 1)
        return driver.TensorMap(Place(None, gate_up.data_ptr()), driver.TensorMapShape(sizes, strides, box))

    def _down_map(self, down: Tensor) -> driver.TensorMap:
        experts, rows, columns = down.shape
        expert_stride, row_stride = down.stride(0) * 2, down.stride(1) * 2
        box = (64, 64, 1, 1) if self.in_out else (64, self.out_per_tile, 1, 1)
        shape = driver.TensorMapShape((columns, rows, 1, experts), (row_stride, 16, expert_stride), box)
        return driver.TensorMap(Place(None, down.data_ptr()), shape)

    def _hidden_map(self, layout: abi.WorkspaceLayout, rows: int, width: int) -> driver.TensorMap:
        shape = driver.TensorMapShape((width, rows), (width * 2,), (64, self.hidden_box_rows))
        return driver.TensorMap(Place("workspace", layout.hidden), shape)

    def prepare(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        spec: ExpertsSpec,
        *,
        deadline_ns: int = DEADLINE_NS,
        num_column_groups: int = 1,
        router: LaunchRouter | None = None,
    ) -> Prepared:
        """Everything of a call but the addresses of x, ids, weights, output and workspace.

        With a ``router`` the launch computes ids and weights itself; then those passed here only say their shape, and
        are int32 and float32. Holds addresses of the weights and biases: good for as long as the tensors passed here
        live. The caller has checked that this kernel covers the call.
        """
        (num_tokens, model_width), top_k, experts = x_TD.shape, ids_TK.shape[1], gate_up.shape[0]
        expert_width = gate_up.shape[2 if self.in_out else 1] // 2
        interleaved = spec.gate_layout == "interleaved"
        alpha, limit = spec.activation_params or (0.0, 0.0)
        assert 1 <= num_column_groups <= abi.MAX_COLUMN_GROUPS
        assert bool(self.routes) == (router is not None), "kernels with a router need one, others have no use for it"
        if router is not None:
            assert (ids_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32), "as the router phase writes them"
        layout = abi.workspace_layout(
            num_tokens=num_tokens,
            top_k=top_k,
            num_local_experts=experts,
            model_width=model_width,
            expert_width=expert_width,
            max_tokens_per_tile=self.max_tokens,
            num_router_experts=router.params.num_experts if router else 0,
        )
        control = control_blocks(self.device_index)
        params = abi.MoeParams(
            gate_up_bias=0 if gate_up_bias is None else gate_up_bias.data_ptr(),
            down_bias=0 if down_bias is None else down_bias.data_ptr(),
            error=control.error.data_ptr(),
            deadline_ns=deadline_ns,
            x_row_elements=x_TD.stride(0),
            num_tokens=num_tokens,
            top_k=top_k,
            num_local_experts=experts,
            expert_offset=spec.expert_offset,
            model_width=model_width,
            expert_width=expert_width,
            bias_feature_stride=2 if interleaved else 1,
            bias_pair_stride=1 if interleaved else expert_width,
            ids_are_i64=ids_TK.dtype == torch.int64,
            weights_are_bf16=weights_TK.dtype == torch.bfloat16,
            weight_on_input=spec.weight_on == "input",
            num_column_groups=num_column_groups,
            act_alpha=alpha,
            act_limit=limit,
        )
        places = {name: Place(name, 0) for name in ("x", "ids", "weights", "out", "control")}
        places |= {name: Place("workspace", offset) for name, offset in layout.offsets().items()}
        if router:
            params.router_weight, params.router_row_elements = router.weight_ED.data_ptr(), router.weight_ED.stride(0)
            params.router_bias = 0 if router.bias_E is None else router.bias_E.data_ptr()
            params.route = router.params
            places |= {"ids": places["routed_ids"], "weights": places["routed_weights"]}
        launcher = self._kernel.launcher(
            params,
            bases=_BASES,
            moving=places,
            tensor_maps=(
                self._gate_up_map(gate_up, interleaved),
                self._down_map(down),
                self._hidden_map(layout, num_tokens * top_k, expert_width),
            ),
            grid=self.num_sms,
            threads=self.threads,
            shared_bytes=self.shared_bytes,
            control=control,
        )
        return Prepared(launcher, layout, self.device_index)


def raise_timeout(device_index: int) -> None:
    """Raises PeerTimeout with what the kernel wrote, and clears the record; of many threads one raises."""
    error = control_blocks(device_index).error
    with _record_lock:
        phase, cta, expert, tile, observed, expected = error.tolist()
        error.zero_()
    if phase == 0:
        return  # another thread has raised it
    raise PeerTimeout(
        f"a wait inside the MoE kernel must end before its deadline, got {observed} of {expected} arrivals while "
        f"waiting for {abi.WAIT_PHASES.get(phase, phase)} (CTA {cta}, expert {expert}, tile {tile}); the output of "
        "that launch is NaN where it needed them: discard the results since the last check and run again; "
        f"if it comes back, look for another process that holds GPU {device_index}"
    )


def check() -> None:
    """Raises if a launch of the fused kernel that has ended, on any device used so far, ran into a deadline.

    Waits for nothing: synchronise first. Calls look by themselves, before they launch; replays of a CUDA graph make no
    calls, so that this is how to learn about them. Costs a read of host memory per device; without a GPU, nothing.

    Raises:
        PeerTimeout: one did; the record is cleared.
    """
    for device_index, blocks in list(_blocks_of_device.items()):
        if blocks.expired:
            raise_timeout(device_index)
