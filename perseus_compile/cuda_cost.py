"""How long will one call of the experts take on a GPU? Numbers in, milliseconds out; looks at no device.

The fused kernel: launch and sort, then the stream of weights from memory beside the work of the CTAs, then the last
sums. ``docs/kernels.md`` has the terms in words, ``docs/measured.md`` predicted beside measured times.

Where the constants come from, all of one NVIDIA H200: *ceiling* is a pure read of so many bytes; *trace* are cycles
counted inside the kernel; *fitted* are five numbers fitted together (least squares of the logarithm) to the 57 rows
``experts`` / ``perseus`` of benchmarks/results/moe_h200_2026-11-30.jsonl and, up to one common factor for the older
kernel, to moe_tiles_h200_2026-11-30.jsonl. The plain path is fitted to the 57 rows ``experts`` / ``plain``. All of them
route evenly, and so does the model.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from perseus_compile.jit.spec import TILE_CONFIGS, TileConfig

# The kernel's own numbers (csrc/include/perseus: common/config.cuh, ptx/wgmma.cuh).
TILE_WIDTHS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)  # tokens that a product is compiled for
_ROWS_PER_GROUP = 128  # weight rows of one consumer warpgroup; half of them are gate rows
_K_BLOCK = 64
_ROW_BYTES = 128  # of one weight row or token in a k block
_HIDDEN_BOX_ROWS = 32  # most rows of `hidden` that one load brings
_PRIVATE_SORT_ROWS = 1024

_STREAM_SHARE = 0.96  # of the data sheet's bandwidth that a long read reaches (ceiling)
_RAMP_MS, _RAMP_BYTES = 0.011, 50e6  # a short read reaches less: the time that it loses, and how short (ceiling)
_FIXED_MS = 0.0125  # launch, first loads, flags between the two products, exit (fitted)
_OVERLAP = 2.6  # memory and CTA times t add up as (sum of t^p)^(1/p): p = 1 no overlap, large p full (fitted)
_L2_BYTES_PER_CYCLE = 47.0  # of one SM's loads (fitted)
_MATH_SLOWDOWN = 1.16  # of a k block's products over the tensor cores' rate: fills, messages, full stages (fitted)
_FLOPS_PER_CYCLE = 4096  # of one SM, dense bfloat16
_EPILOGUE_CYCLES, _EPILOGUE_CYCLES_PER_TOKEN = 400.0, 28.0  # of a tile (trace)
_COMBINE_CYCLES = 6000.0  # of the last sum, which nothing hides (trace)
_COMBINE_BYTES_PER_CYCLE = 13.0  # of one SM (trace)
_COMBINE_SHARE_IN_GROUPS = 0.9  # of the sums' time where some of them run beside products (measured: 1-2 % of a call)
_SORT_CYCLES, _SORT_CYCLES_PER_ROW = 5000.0, 7.0  # every CTA alone (trace)
_SHARED_SORT_CYCLES, _SHARED_SORT_CYCLES_PER_ROW = 16000.0, 0.12  # all CTAs together (trace)
_L2_BYTES = 50e6
# The clock falls from one share of the boost clock to another where the work lasts milliseconds (trace; power cap).
_SHORT_CLOCK, _LONG_CLOCK = 0.885, 0.74
_CLOCK_FALLS_MS = 5.8  # half of the fall (fitted)

_PLAIN_FIXED_MS, _PLAIN_BIAS_MS = 0.076, 0.030  # a dozen launches in a CUDA graph; more where there are biases
_PLAIN_STREAM_SHARE = 0.6  # of the data sheet's bandwidth
_PLAIN_OVERLAP = 1.4
_PLAIN_FLOP_SHARE = 0.68  # of the tensor cores' rate at the boost clock
_PLAIN_PASSES_D, _PLAIN_PASSES_F = 15.6, 17.3  # reads and writes of a routed row outside the products
_PLAIN_PASSES_BIAS = 9.7  # the same per width of both biases
_PLAIN_PASS_SHARE = 0.81  # of the data sheet's bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuNumbers:
    """What the model knows of a GPU."""

    name: str
    num_sms: int
    clock_ghz: float  # boost
    memory_tb_per_s: float  # data sheet: clock x bus width x 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallShape:
    """The numbers of a ``perseus::experts`` call that its time depends on; bfloat16."""

    num_tokens: int
    top_k: int
    num_experts: int  # over all ranks: the router chooses among them
    num_local_experts: int  # whose weights are passed
    model_width: int
    expert_width: int
    has_biases: bool
    weight_layout: str
    gate_layout: str
    activation: str

    @property
    def rows_per_expert(self) -> float:
        """Mean."""
        return self.num_tokens * self.top_k / self.num_experts

    @property
    def num_rows(self) -> float:
        """Mean number of routed rows whose expert is local."""
        return self.rows_per_expert * self.num_local_experts

    @property
    def weight_bytes(self) -> float:
        """Of the local experts that even routing hits, on average: E * (1 - (1 - K/E)^T) of all E."""
        hit_share = 1 - (1 - min(1.0, self.top_k / self.num_experts)) ** self.num_tokens
        return self.num_local_experts * hit_share * 3 * self.model_width * self.expert_width * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a call."""

    path: Literal["fused", "plain"]
    tiles: str | None  # name in jit/spec.py; None on the plain path
    column_groups: int  # groups of output columns of the fused kernel; 1 on the plain path

    def __str__(self) -> str:
        return f"{self.tiles} x {self.column_groups}" if self.tiles else "plain path"


PLAIN = Candidate(path="plain", tiles=None, column_groups=1)


def candidates(shape: CallShape) -> tuple[Candidate, ...]:
    """Every way to run a call, the plain path last."""
    fused = [
        Candidate(path="fused", tiles=tiles, column_groups=groups)
        for tiles, config in TILE_CONFIGS.items()
        for groups in (1, 2)
        if groups == 1 or shape.model_width > config.groups * _ROWS_PER_GROUP
    ]
    return (*fused, PLAIN)


def predicted_ms(candidate: Candidate, shape: CallShape, gpu: GpuNumbers) -> float:
    """Milliseconds of a call, its router not included."""
    if candidate.tiles is None:
        return plain_ms(shape, gpu)
    return fused_ms(shape, gpu, candidate.tiles, candidate.column_groups)


def fused_ms(shape: CallShape, gpu: GpuNumbers, tiles: str, column_groups: int) -> float:
    """Milliseconds of the fused kernel with a tile configuration (jit/spec.py) and so many groups of output columns."""
    config = TILE_CONFIGS[tiles]
    stream_ms = _stream_ms(shape, gpu, column_groups)
    work_cycles = _tile_cycles(shape, gpu, config) + _combine_cycles(shape, gpu, column_groups)
    serial_cycles = _sort_cycles(shape, config) + _COMBINE_CYCLES

    def at_clock(share: float) -> float:
        ms_per_cycle = 1 / (share * gpu.clock_ghz * 1e6)
        overlapped_ms = _together(work_cycles * ms_per_cycle, stream_ms, _OVERLAP)
        return _FIXED_MS + serial_cycles * ms_per_cycle + overlapped_ms

    ms = at_clock(_SHORT_CLOCK)
    for _ in range(2):  # the clock depends on the time: two rounds settle it to under 1 %
        ms = at_clock(_LONG_CLOCK + (_SHORT_CLOCK - _LONG_CLOCK) / (1 + ms / _CLOCK_FALLS_MS))
    return ms


def plain_ms(shape: CallShape, gpu: GpuNumbers) -> float:
    """Milliseconds of sort, gather, two grouped products and a sum out of torch's ops, replayed as one CUDA graph."""
    bytes_per_ms = gpu.memory_tb_per_s * 1e9
    flops = 6 * shape.num_rows * shape.model_width * shape.expert_width
    flops_per_ms = _PLAIN_FLOP_SHARE * gpu.num_sms * gpu.clock_ghz * 1e6 * _FLOPS_PER_CYCLE
    products_ms = _together(
        shape.weight_bytes / (_PLAIN_STREAM_SHARE * bytes_per_ms), flops / flops_per_ms, _PLAIN_OVERLAP
    )
    passes = _PLAIN_PASSES_D * shape.model_width + _PLAIN_PASSES_F * shape.expert_width
    fixed_ms = _PLAIN_FIXED_MS
    if shape.has_biases:
        passes += _PLAIN_PASSES_BIAS * (2 * shape.expert_width + shape.model_width)
        fixed_ms += _PLAIN_BIAS_MS
    return fixed_ms + products_ms + shape.num_rows * passes * 2 / (_PLAIN_PASS_SHARE * bytes_per_ms)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _together(one: float, other: float, overlap: float) -> float:
    return (one**overlap + other**overlap) ** (1 / overlap)


def _stream_ms(shape: CallShape, gpu: GpuNumbers, column_groups: int) -> float:
    """Weights once; tokens, hidden rows and outputs only as far as L2 does not hold them.

    Hidden rows are written once and read by every column group, outputs of experts are written and read once.
    """
    between = shape.num_tokens * shape.model_width * 4 + shape.num_rows * (
        2 * shape.expert_width * (1 + column_groups) + 4 * shape.model_width
    )
    num_bytes = shape.weight_bytes + max(0.0, between - _L2_BYTES)
    ramp_ms = _RAMP_MS * (1 - math.exp(-num_bytes / _RAMP_BYTES))
    return ramp_ms + num_bytes / (_STREAM_SHARE * gpu.memory_tb_per_s * 1e9)


def _sort_cycles(shape: CallShape, config: TileConfig) -> float:
    num_choices = shape.num_tokens * shape.top_k
    if config.groups == 1 and num_choices <= _PRIVATE_SORT_ROWS:
        return _SORT_CYCLES + _SORT_CYCLES_PER_ROW * num_choices
    return _SHARED_SORT_CYCLES + _SHARED_SORT_CYCLES_PER_ROW * num_choices


def _combine_cycles(shape: CallShape, gpu: GpuNumbers, column_groups: int) -> float:
    bytes_per_sm = shape.num_rows * shape.model_width * 2 / gpu.num_sms
    share = 1.0 if column_groups == 1 else _COMBINE_SHARE_IN_GROUPS
    return share * bytes_per_sm / _COMBINE_BYTES_PER_CYCLE


def _tile_cycles(shape: CallShape, gpu: GpuNumbers, config: TileConfig) -> float:
    """Cycles until the last CTA has finished its tiles of both products, were memory no limit."""
    weight_rows = config.groups * _ROWS_PER_GROUP
    hidden_tiles = _ceil_div(shape.expert_width, weight_rows // 2)
    out_tiles = _ceil_div(shape.model_width, weight_rows)
    hidden_k_blocks, out_k_blocks = _ceil_div(shape.model_width, _K_BLOCK), _ceil_div(shape.expert_width, _K_BLOCK)
    box_rows = min(config.max_tokens, _HIDDEN_BOX_ROWS)
    num_blocks = hidden_cycles = out_cycles = 0.0  # cycles: sums over one tile of each block
    for rows, count in _token_blocks(shape, config.max_tokens):
        width = next(width for width in TILE_WIDTHS if rows <= width)
        epilogue = _EPILOGUE_CYCLES + _EPILOGUE_CYCLES_PER_TOKEN * width
        loaded_rows = _ceil_div(rows, box_rows) * box_rows
        num_blocks += count
        hidden_cycles += count * (hidden_k_blocks * _k_block_cycles(weight_rows, width, rows) + epilogue)
        out_cycles += count * (out_k_blocks * _k_block_cycles(weight_rows, width, loaded_rows) + epilogue)
    if num_blocks == 0:
        return 0.0
    mean_hidden, mean_out = hidden_cycles / num_blocks, out_cycles / num_blocks
    return _last_finish(gpu.num_sms, num_blocks * hidden_tiles, mean_hidden, num_blocks * out_tiles, mean_out)


def _k_block_cycles(weight_rows: int, width: int, loaded_rows: int) -> float:
    """The slower of products and loads. Below 32 tokens, products wait for weights out of shared memory."""
    math_cycles = _MATH_SLOWDOWN * weight_rows * max(width, 32) * _K_BLOCK * 2 / _FLOPS_PER_CYCLE
    return max(math_cycles, (weight_rows + loaded_rows) * _ROW_BYTES / _L2_BYTES_PER_CYCLE)


def _last_finish(num_sms: int, num_first: float, first: float, num_second: float, second: float) -> float:
    """When SMs that take tiles in order are all done: ``num_first`` tiles of ``first`` cycles, then the others."""
    even = (num_first * first + num_second * second) / num_sms
    if num_second >= num_sms:
        return even + second / 2
    whole_waves, in_last_wave = divmod(num_first, num_sms)
    start = whole_waves * first if num_second <= num_sms - in_last_wave else (whole_waves + 1) * first
    end_of_first = (whole_waves + (in_last_wave > 0)) * first
    return max(even, end_of_first, start + second)


def _token_blocks(shape: CallShape, max_tokens: int) -> list[tuple[int, float]]:
    """Rows of a token block, and how many such blocks all local experts have on average (schedule/worklist.cuh)."""
    blocks: dict[int, float] = {}
    for rows, probability in _rows_of_one_expert(shape.num_tokens, min(1.0, shape.top_k / shape.num_experts)):
        num_blocks = _ceil_div(rows, max_tokens)
        whole = _ceil_div(_ceil_div(rows, num_blocks), 8) * 8
        last = rows - (num_blocks - 1) * whole
        for block_rows, count in ((whole, num_blocks - 1), (last, 1)):
            if count:
                blocks[block_rows] = blocks.get(block_rows, 0.0) + count * probability * shape.num_local_experts
    return list(blocks.items())


@functools.lru_cache(maxsize=64)
def _rows_of_one_expert(num_tokens: int, share: float) -> tuple[tuple[int, float], ...]:
    """Rows (at least 1) of one expert and their probability where each token chooses it with probability ``share``."""
    if share == 1:
        return ((num_tokens, 1.0),)
    mean, deviation = num_tokens * share, math.sqrt(num_tokens * share * (1 - share))
    low, high = max(0, int(mean - 5 * deviation)), min(num_tokens, int(mean + 6 * deviation) + 6)
    step = max(1, (high - low) // 64)
    counts = range(low, high + 1, step)
    logarithms = [
        math.lgamma(num_tokens + 1) - math.lgamma(rows + 1) - math.lgamma(num_tokens - rows + 1)
        + rows * math.log(share) + (num_tokens - rows) * math.log1p(-share)
        for rows in counts
    ]  # fmt: skip
    largest = max(logarithms)
    weights = [math.exp(one - largest) for one in logarithms]
    return tuple(
        (rows, weight / sum(weights)) for rows, weight in zip(counts, weights, strict=True) if rows and weight > 1e-9
    )
