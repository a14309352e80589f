"""How fast is a whole model, beside Inductor? Prefill of one long prompt, and decode steps over a static cache.

The model has the widths of Qwen3-30B-A3B, fewer layers and random weights. Contestants, the ``impl`` of a row:
``eager``, Hugging Face's model as it is (grouped_mm); ``inductor`` and ``perseus``, compiled for exactly these sizes;
on a GPU ``inductor_reduce_overhead`` and ``perseus_reduce_overhead``, the same in Inductor's mode "reduce-overhead".
``first_call_s`` is the time of the first call, which compiles; ``cudagraph_skips`` counts graphs that this mode had to
run without a CUDA graph.

Axes: B sequences, T new tokens of each, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from perseus_compile import observe
from perseus_compile.backend import perseus
from perseus_compile.testing import cpu_timing, cuda_timing
from perseus_compile.testing.bench_rows import Row, WrongResult, row
from perseus_compile.testing.conditions import conditions
from perseus_compile.testing.models import config_for, random_causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, StaticCache

# config.json of Qwen3-30B-A3B.
QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
BASELINES = ("inductor", "inductor_reduce_overhead")

Function = Callable[["PreTrainedModel", Tensor, Tensor, "StaticCache | None"], Tensor]

# Rounding makes a token that is between two experts change its choice, in eager code as in any other, so errors are
# compared with those of eager, as medians over tokens. On a CPU, 8 layers of 128 experts, top-8, hidden 256: medians
# over 64 tokens of correct code agree within 2 %, over 16 tokens within a factor of 2.5; one choice of eight left out
# is 10 times eager's own error.
_ERROR_FACTOR = 2.0
_CHECKED_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of the model.

    Attributes:
        sequences: B.
        new_tokens: T, of each sequence.
        context: tokens of each sequence that are in the cache before; 0: a prefill, without a cache.
    """

    name: str
    sequences: int
    new_tokens: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.new_tokens


CACHE_LENGTH = 1024  # tokens of each sequence


def workloads(prefill_lengths: Sequence[int], decode_batches: Sequence[int]) -> list[Workload]:
    """Prefills of one sequence, then decode steps of so many sequences each."""
    return [
        *(Workload(name="prefill", sequences=1, new_tokens=length, context=0) for length in prefill_lengths),
        *(
            Workload(name="decode", sequences=batch, new_tokens=1, context=CACHE_LENGTH - 1)
            for batch in decode_batches
        ),
    ]


class Call:
    """A workload on a model: tensors at fixed addresses, as CUDA graphs need them."""

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        self.model, self.context = model, workload.context
        shape, device = (workload.sequences, workload.new_tokens), model.device
        self.ids_BT = torch.zeros(shape, dtype=torch.int64, device=device)
        positions_T = torch.arange(workload.context, workload.context + workload.new_tokens, device=device)
        self.positions_BT = positions_T.expand(shape).contiguous()
        self.cache = _random_cache(model, workload) if workload.context else None

    def rewind(self) -> None:
        """Makes the cache forget the last call, which appended to it."""
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.context)

    def bound(self, function: Function) -> Callable[[], Tensor]:
        return lambda: function(self.model, self.ids_BT, self.positions_BT, self.cache)

    def checked_logits(self, function: Function) -> Tensor:
        """Logits [N, V] in float32 of N >= 64 tokens, over as many inputs as that takes; the same ones at each call."""
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(math.ceil(_CHECKED_TOKENS / self.ids_BT.shape[0])):
            self.ids_BT.copy_(torch.randint(self.model.config.vocab_size, self.ids_BT.shape, generator=generator))
            self.rewind()
            torch.compiler.cudagraph_mark_step_begin()
            found.append(self.bound(function)().float())
        return torch.cat(found)


def forward(model: PreTrainedModel, ids_BT: Tensor, positions_BT: Tensor, cache: StaticCache | None) -> Tensor:
    """Logits [B, V] of the last token of each sequence; this is what is compiled."""
    # By position, since transformers 5.24 renamed past_key_values.
    no_mask = None
    return model(ids_BT, no_mask, positions_BT, cache, use_cache=cache is not None, logits_to_keep=1).logits[:, -1]


def _random_cache(model: PreTrainedModel, workload: Workload) -> StaticCache:
    """Keys and values of a context that nobody computed; their values do not change what a step costs."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=workload.context + workload.new_tokens)
    heads, width = config.num_key_value_heads, config.head_dim
    cache.early_initialization(workload.sequences, heads, width, model.dtype, model.device)
    for index, layer in enumerate(cache.layers):
        generator = torch.Generator(model.device).manual_seed(index)
        for values in (layer.keys, layer.values):
            # Drawn in float32, so that a model in another dtype gets the same context, rounded.
            values.copy_(torch.randn(values.shape, generator=generator, device=model.device))
    return cache


def random_model(sizes: dict[str, Any], *, num_layers: int, device: torch.device) -> PreTrainedModel:
    """A Qwen3-MoE model in bfloat16, made on ``device``."""
    config = config_for("qwen3_moe", num_layers=num_layers, **sizes)
    return random_causal_lm(config, dtype=torch.bfloat16, device=device)


@torch.no_grad()
def exact_logits(model: PreTrainedModel, workloads: Sequence[Workload]) -> dict[Workload, Tensor]:
    """Of each workload, what ``checked_logits`` is in float32. Needs three times the memory of the model."""
    exact = copy.deepcopy(model).float()
    return {workload: Call(exact, workload).checked_logits(forward) for workload in workloads}


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    case: str,
    workload: Workload,
    exact_NV: Tensor,
    *,
    rounds: int,
    with_graphs: bool,
    commit: str | None = None,
) -> list[Row]:
    """One row per contestant, all on the same weights, in one process, in rotating order.

    Args:
        case: a name for the model.
        exact_NV: of ``exact_logits``.
        with_graphs: also in the mode "reduce-overhead".
        commit: see ``conditions``.

    Raises:
        WrongResult: a contestant is farther from float32 than rounding explains, or perseus did not rewrite every
            layer.
    """
    call = Call(model, workload)
    own_error = median_error(call.checked_logits(forward), exact_NV)
    functions: dict[str, Function] = {"eager": forward} | _compiled(with_graphs)
    more: dict[str, dict[str, Any]] = {}
    for impl, function in functions.items():
        skips = counters["inductor"]["cudagraph_skips"]
        with observe.collect() as reports:
            seconds = _seconds_of_first_call(call, function)
        more[impl] = {"first_call_s": seconds, "cudagraph_skips": counters["inductor"]["cudagraph_skips"] - skips}
        num_rewritten = sum(len(report.layers) for report in reports)
        wanted = model.config.num_hidden_layers if impl.startswith("perseus") else 0
        if num_rewritten != wanted:
            raise WrongResult(f"{impl}: perseus must rewrite {wanted} layers, got {num_rewritten}")
        error, limit = median_error(call.checked_logits(function), exact_NV), _ERROR_FACTOR * own_error
        if not error <= limit:
            raise WrongResult(f"{impl} must be within {limit:.2g} of float32, its error is {error:.2g}")
    contestants = {impl: call.bound(function) for impl, function in functions.items()}
    clock_mhz = None
    if model.device.type == "cuda":
        times = cuda_timing.measure(contestants, rounds, before_each=call.rewind)
        call.rewind()

        def rewound_call() -> None:
            call.rewind()
            contestants["perseus"]()

        clock_mhz = cuda_timing.clock_mhz(rewound_call, statistics.median(times["perseus"]))
    else:
        times = cpu_timing.measure(contestants, rounds, before_each=call.rewind)
    found = conditions(model.device, commit=commit, clock_mhz=clock_mhz)
    return [
        row(
            *("e2e", f"{case}/{workload.name}", milliseconds, found),
            tokens=workload.tokens,
            dtype=str(model.dtype).removeprefix("torch."),
            impl=impl,
            **more[impl],
        )
        for impl, milliseconds in times.items()
    ]


def median_error(logits_NV: Tensor, exact_NV: Tensor) -> float:
    """Median over tokens of the relative L2 distance."""
    distance_N = (logits_NV - exact_NV).norm(dim=-1) / exact_NV.norm(dim=-1)
    return float(distance_N.median())


def _compiled(with_graphs: bool) -> dict[str, Function]:
    torch._dynamo.reset()
    # Dynamo about helpers of transformers that are cached by version number; tracing through them is harmless.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    static: dict[str, Any] = {"dynamic": False, "fullgraph": True}
    functions: dict[str, Function] = {
        "inductor": torch.compile(forward, **static),
        "perseus": torch.compile(forward, backend=perseus, **static),
    }
    if with_graphs:
        mode = "reduce-overhead"
        functions["inductor_reduce_overhead"] = torch.compile(forward, mode=mode, **static)
        functions["perseus_reduce_overhead"] = torch.compile(forward, backend=perseus, options={"mode": mode}, **static)
    return functions


def _seconds_of_first_call(call: Call, function: Function) -> float:
    call.rewind()
    start = time.perf_counter()
    call.bound(function)()
    if call.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
