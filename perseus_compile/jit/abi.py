"""How do the numbers of a call lie in memory for the kernels? Mirrors common/params.cuh, common/route_params.cuh and
layout/workspace.cuh.

The kernel image carries the sizes of its structures; ``moe_kernel`` compares them with these before the first launch.
"""

from __future__ import annotations

import ctypes
import dataclasses

_ADDRESSES = (
    *("x", "ids", "weights", "gate_up_bias", "down_bias", "out", "router_weight", "router_bias"),
    *("hidden", "slots", "sorted_rows", "block_list", "hidden_ready", "chunk_counts"),
    *("logits", "routed_ids", "routed_weights"),
    *("control", "error"),
)
_NUMBERS = (
    *("num_tokens", "top_k", "num_local_experts", "expert_offset", "model_width", "expert_width"),
    *("bias_feature_stride", "bias_pair_stride", "ids_are_i64", "weights_are_bf16", "weight_on_input"),
    "num_column_groups",
)
_ROUTE_NUMBERS = (
    *("num_tokens", "num_experts", "top_k", "routing", "logits_are_bf16", "renormalize", "round_to_bf16"),
    *("num_groups", "topk_groups"),
)


class RouteParams(ctypes.Structure):
    _fields_ = [
        ("correction_bias", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in _ROUTE_NUMBERS),
        ("renormalize_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class RouteKernelParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("logits", "ids", "weights")),
        ("route", RouteParams),
    ]


class MoeParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("deadline_ns", ctypes.c_uint64),
        ("x_row_elements", ctypes.c_int64),
        ("router_row_elements", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in _NUMBERS),
        ("act_alpha", ctypes.c_float),
        ("act_limit", ctypes.c_float),
        ("route", RouteParams),
    ]


class ErrorRecord(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("phase", "cta", "expert", "tile", "observed", "expected")]


CONTROL_WORDS = 11 + 8 + 384
MAX_COLUMN_GROUPS = 8
MAX_SORT_CHUNKS = 64
WAIT_PHASES = {
    1: "counting rows",
    2: "sorting rows",
    3: "hidden rows of an expert",
    4: "expert outputs",
    5: "logits of the router",
    6: "choices of the router",
}
_ALIGN_BYTES = 256


@dataclasses.dataclass(frozen=True)
class WorkspaceLayout:
    """Offsets in bytes into a call's workspace."""

    hidden: int
    slots: int
    sorted_rows: int
    block_list: int
    hidden_ready: int
    chunk_counts: int
    logits: int
    routed_ids: int
    routed_weights: int
    total_bytes: int

    def offsets(self) -> dict[str, int]:
        """Offset of each array, by the name of its address in ``MoeParams``."""
        return {name: offset for name, offset in dataclasses.asdict(self).items() if name != "total_bytes"}


def max_blocks(num_rows: int, num_experts: int, max_tokens_per_tile: int) -> int:
    return num_rows // max_tokens_per_tile + min(num_rows, num_experts)


def workspace_bound_bytes(*, num_tokens: int, top_k: int, model_width: int, expert_width: int) -> int:
    """What ``workspace_layout`` never exceeds, whatever the tiles: at most 1024 experts and widths from 8 on."""
    rows = num_tokens * top_k
    return rows * model_width * 5 + rows * expert_width * 2 + (32 << 20)  # 2.5 bfloat16 numbers a row and model feature


def workspace_layout(
    *,
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    model_width: int,
    expert_width: int,
    max_tokens_per_tile: int,
    num_router_experts: int = 0,
) -> WorkspaceLayout:
    """Where everything lies; ``num_router_experts`` is 0 where ids and weights are given to the launch."""
    rows = num_tokens * top_k
    blocks = max_blocks(rows, num_local_experts, max_tokens_per_tile)
    sizes = (
        rows * expert_width * 2,
        rows * model_width * 2,
        rows * 4,
        blocks * 16,
        blocks * 4,
        MAX_SORT_CHUNKS * num_local_experts * 4,
        num_tokens * num_router_experts * 2,
        rows * 4 if num_router_experts else 0,
        rows * 4 if num_router_experts else 0,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGN_BYTES) * _ALIGN_BYTES)
    return WorkspaceLayout(*offsets)
