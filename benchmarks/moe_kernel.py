"""How fast are the experts on this GPU, against what a user has today? One process per model shape.

    python benchmarks/moe_kernel.py --case qwen3-30b --tokens 1 16 128 --out rows.jsonl

Every implementation of a cell is one CUDA graph; graphs of a cell are replayed in rotating order, 256 MiB are written
before each replay (L2 cold), and the median of --rounds replays counts. Differences under 5 % are ties. `experts` rows
start from ids and weights, `layer` rows from hidden states (router GEMM, softmax, top-k, renormalise included).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perseus_compile import activations, cuda_plan, fused_experts, fused_router, grouped
from perseus_compile.facts import ExpertsSpec, RoutingSpec

Row = dict[str, Any]
FLUSH_BYTES = 256 << 20
DEFAULT_TOKENS = (1, 16, 128, 512, 1024, 4096, 8192)
MAX_ERROR = 9e-3  # relative L2 against float32; chains that round before the activation reach 7e-3


SPEC = ExpertsSpec(
    weight_layout="out_in", gate_layout="concatenated", activation="silu", activation_params=(), num_experts=0
)
GPT_OSS_SPEC = ExpertsSpec(
    weight_layout="in_out",
    gate_layout="interleaved",
    activation="clamped_swiglu",
    activation_params=(1.702, 7.0),
    num_experts=0,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Axes: D model width, F expert width, E experts, K choices per token."""

    model_width: int
    expert_width: int
    num_experts: int
    top_k: int
    spec: ExpertsSpec = SPEC
    bias: bool = False


# docs/measured.md; gpt-oss as a plain gated layer without bias, and as the model has it
CASES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "olmoe": Shape(2048, 1024, 64, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "gpt-oss-120b-as-is": Shape(2880, 2880, 128, 4, GPT_OSS_SPEC, bias=True),
    "dsv3-slice": Shape(7168, 2048, 32, 8),
}
ROUTING = RoutingSpec(
    routing="softmax_topk",
    top_k=1,
    renormalize=True,
    router_dtype=torch.bfloat16,
    score_dtype=torch.float32,
    weights_dtype=torch.float32,
)


@dataclasses.dataclass
class Layer:
    """Random weights of one layer, BF16."""

    shape: Shape
    router: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    spec: ExpertsSpec
    routing: RoutingSpec

    @staticmethod
    def random(shape: Shape) -> Layer:
        def normal(*sizes: int) -> Tensor:
            return torch.empty(*sizes, device="cuda", dtype=torch.bfloat16).normal_().mul_(sizes[-1] ** -0.5)

        d, f, e = shape.model_width, shape.expert_width, shape.num_experts
        gate_up, down = normal(e, 2 * f, d), normal(e, d, f)
        if shape.spec.weight_layout == "in_out":
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
        biases = (normal(e, 2 * f), normal(e, d)) if shape.bias else (None, None)
        spec, routing = (
            dataclasses.replace(shape.spec, num_experts=e),
            dataclasses.replace(ROUTING, top_k=shape.top_k),
        )
        return Layer(shape, normal(e, d), gate_up, biases[0], down, biases[1], spec, routing)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        return self.gate_up, self.gate_up_bias, self.down, self.down_bias

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = F.linear(x, self.router).softmax(-1, dtype=torch.float32).topk(self.shape.top_k, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def fused_route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routed = fused_router.route_logits(F.linear(x, self.router), None, self.routing)
        assert routed is not None, "the routing kernel does not cover this call"
        return routed[1], routed[0]

    def chain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The grouped_mm chain of Hugging Face models: sort, gather, two grouped products, unsort, weighted sum."""
        if self.spec.activation != "silu":
            return grouped.forward(x, ids, weights, *self.weights, self.spec)
        flat = ids.reshape(-1)
        order = flat.argsort()
        offsets = torch.histc(flat[order].float(), self.shape.num_experts, 0, self.shape.num_experts - 1)
        offsets = offsets.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // ids.shape[1]], self.gate_up.mT, offsets).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.mT, offsets)
        out = out * weights.to(x.dtype).reshape(-1)[order, None]  # in the model's dtype, as the models do
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return out[inverse].view(*ids.shape, -1).sum(1).to(x.dtype)

    def fused(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = fused_experts.run_experts(x, ids, weights, *self.weights, self.spec)
        assert out is not None, "the fused kernel does not cover this call"
        return out

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in ids.unique().tolist():
            tokens, choices = (ids == expert).nonzero(as_tuple=True)
            gate_up, down = self.gate_up[expert].float(), self.down[expert].float()
            if self.spec.weight_layout == "out_in":
                gate_up, down = gate_up.mT, down.mT
            hidden = x[tokens].float() @ gate_up
            if self.gate_up_bias is not None:
                hidden += self.gate_up_bias[expert].float()
            rows = activations.activate(hidden, self.spec).bfloat16().float() @ down
            if self.down_bias is not None:
                rows += self.down_bias[expert].float()
            out.index_add_(0, tokens, rows * weights[tokens, choices, None])
        return out


class CompiledChain:
    """The chain under Inductor, one compile for every token count."""

    def __init__(self, layer: Layer) -> None:
        self.experts = torch.compile(layer.chain, dynamic=True)
        self.layer = torch.compile(lambda x: layer.chain(x, *layer.route(x)), dynamic=True)


@dataclasses.dataclass
class Captured:
    """A graph, and what it must keep alive."""

    graph: torch.cuda.CUDAGraph
    out: Tensor
    function: Callable[[], Tensor]


def capture(function: Callable[[], Tensor]) -> Captured:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return Captured(graph, out, function)


def measure(graphs: dict[str, Captured], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every replay; rotating order, cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for round_index in range(rounds):
        turn = round_index % len(names)
        for name in names[turn:] + names[:turn]:
            flush.fill_(round_index % 256)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


@functools.cache
def conditions() -> Row:
    def ask(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"

    return {
        "gpu": torch.cuda.get_device_name(),
        "clock_mhz": ask("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"),
        "torch": torch.__version__,
        "commit": ask("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }


def run_cell(layer: Layer, name: str, num_tokens: int, rounds: int, compiled: CompiledChain | None) -> list[Row]:
    """Rows of one shape and one token count; every implementation is checked against float32 first."""
    shape = layer.shape
    x = torch.randn(num_tokens, shape.model_width, device="cuda").bfloat16()
    ids, weights = layer.route(x)
    sample = torch.arange(0, num_tokens, max(1, num_tokens // 16), device="cuda")[:16]
    expected = layer.reference(x[sample], ids[sample], weights[sample])
    graphs = {
        "experts/perseus": capture(lambda: layer.fused(x, ids, weights)),
        "experts/plain": capture(lambda: layer.chain(x, ids, weights)),
        "layer/perseus": capture(lambda: layer.fused(x, *layer.fused_route(x))),
    }
    if compiled:
        graphs["experts/inductor"] = capture(lambda: compiled.experts(x, ids, weights))
        graphs["layer/inductor"] = capture(lambda: compiled.layer(x))
    for key, captured in graphs.items():
        captured.graph.replay()
        error = float((captured.out[sample].float() - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            raise AssertionError(f"{key} must be within {MAX_ERROR} of float32, got {error} on {name} T={num_tokens}")
    hit = int(ids.unique().numel())
    flops = 6.0 * num_tokens * shape.top_k * shape.model_width * shape.expert_width
    weight_bytes = hit * 3.0 * shape.model_width * shape.expert_width * 2
    rows: list[Row] = []
    for key, values in measure(graphs, rounds).items():
        part, impl = key.split("/")
        p20, p50, p80 = (statistics.quantiles(values, n=10)[i] for i in (1, 4, 7))
        plan = cuda_plan.plan_of_call(x, ids, *layer.weights[:3], layer.spec).tiles if impl == "perseus" else ""
        rows.append(
            {
                **{"bench": "moe", "part": part, "case": name, "tokens": num_tokens, "world": 1, "dtype": "bfloat16"},
                **{"impl": impl, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "plan": plan},
                **{"tflops": flops / p50 / 1e9, "weights_tb_per_s": weight_bytes / p50 / 1e9},
                **conditions(),
            }
        )
    print(f"{name} T={num_tokens} {rows[0]['tflops']:.0f} TFLOP/s {rows[0]['weights_tb_per_s']:.2f} TB/s", end="")
    print("".join(f" | {row['part']}/{row['impl']} {row['ms_p50']:.4f}" for row in rows), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(DEFAULT_TOKENS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-inductor", action="store_true", help="leave out the compiled baselines")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    options = parser.parse_args()
    layer = Layer.random(CASES[options.case])
    compiled = None if options.no_inductor else CompiledChain(layer)
    for num_tokens in options.tokens:
        rows = run_cell(layer, options.case, num_tokens, options.rounds, compiled)
        if options.out:
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
