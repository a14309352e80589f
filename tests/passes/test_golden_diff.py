"""What each spelling becomes: the lines of Dynamo's graph that the rewrite changes, as golden text.

Accept a wanted change with EXPECTTEST_ACCEPT=1 and review it like code.
"""

from __future__ import annotations

import torch
from expecttest import TestCase
from spellings import (
    BatchedMM,
    Experts,
    GroupedMM,
    changed,
    chosen_softmax_router,
    grouped_sigmoid_router,
    softmax_router,
)
from torch import Tensor, nn

import perseus_compile
from perseus_compile import observe


def rewrite_diff(layer: nn.Module, dtype: torch.dtype = torch.float32) -> str:
    """Compiles ``layer``, checks its numbers, and returns the lines that the only rewrite changed."""
    torch._dynamo.reset()
    layer = layer.to(dtype)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "eager", "verify": True})
    with torch.no_grad(), observe.collect() as reports:
        actual = compiled(x)
        expected = layer(x)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    (report,) = reports
    assert report.refusals == []
    (rewritten,) = report.layers
    return rewritten.graph_diff


def layer(spelling: type[Experts], **sizes: object) -> Experts:
    torch.manual_seed(0)
    return spelling(**sizes)


class TestExpertSpellings(TestCase):
    maxDiff = None

    def test_grouped_mm_fallback(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(GroupedMM)), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # f32[5, 4]
-%scores = call_function[torch.nn.functional.softmax](args = (%linear,), kwargs = {dim: -1})  # f32[5, 4]
-%topk = call_function[torch.topk](args = (%scores, 2), kwargs = {dim: -1})
-%weights = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%sum_1 = call_method[sum](args = (%weights,), kwargs = {dim: -1, keepdim: True})  # f32[5, 1]
-%weights_1 = call_function[operator.truediv](args = (%weights, %sum_1))  # f32[5, 2]
-%reshape = call_method[reshape](args = (%ids, -1))  # i64[10]
-%sort = call_function[torch.sort](args = (%reshape,))
-%sorted_ids = call_function[operator.getitem](args = (%sort, 0))  # i64[10]
-%permutation = call_function[operator.getitem](args = (%sort, 1))  # i64[10]
-%floordiv = call_function[operator.floordiv](args = (%permutation, 2))  # i64[10]
-%rows = call_function[operator.getitem](args = (%x, %floordiv))  # f32[10, 8]
-%float_1 = call_method[float](args = (%sorted_ids,))  # f32[10]
-%counts = call_function[torch.histc](args = (%float_1,), kwargs = {bins: 4, min: 0, max: 3})  # f32[4]
-%ends = call_function[torch.cumsum](args = (%counts,), kwargs = {dim: 0, dtype: torch.int32})  # i32[4]
-%matrix = call_method[transpose](args = (%self.gate_up, -2, -1))  # f32[4, 8, 24]
-%hidden = call_function[torch.ops.transformers.grouped_mm_fallback](args = (%rows, %matrix, %ends))  # f32[10,
-    24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%matrix_1 = call_method[transpose](args = (%self.down, -2, -1))  # f32[4, 12, 8]
-%out = call_function[torch.ops.transformers.grouped_mm_fallback](args = (%mul, %matrix_1, %ends))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%getitem_7 = call_function[operator.getitem](args = (%reshape_1, %permutation))  # f32[10]
-%unsqueeze = call_method[unsqueeze](args = (%getitem_7, -1))  # f32[10, 1]
-%out_1 = call_function[operator.mul](args = (%out, %unsqueeze))  # f32[10, 8]
-%inverse = call_function[torch.empty_like](args = (%permutation,))  # i64[10]
-%arange = call_function[torch.arange](args = (10,))  # i64[10]
-%setitem = call_function[operator.setitem](args = (%inverse, %permutation, %arange))
-%getitem_8 = call_function[operator.getitem](args = (%out_1, %inverse))  # f32[10, 8]
-%view = call_method[view](args = (%getitem_8, 5, 2, 8))  # f32[5, 2, 8]
-%sum_2 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_2, torch.float32))  # f32[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, renormalize: True, num_experts: 4})  # f32[5, 8]
+return (moe_default,)""")

    def test_grouped_mm_bfloat16(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(GroupedMM, expert_width=16), torch.bfloat16), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # bf16[5, 4]
-%scores = call_function[torch.nn.functional.softmax](args = (%linear,), kwargs = {dim: -1})  # bf16[5, 4]
-%topk = call_function[torch.topk](args = (%scores, 2), kwargs = {dim: -1})
-%weights = call_function[operator.getitem](args = (%topk, 0))  # bf16[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%sum_1 = call_method[sum](args = (%weights,), kwargs = {dim: -1, keepdim: True})  # bf16[5, 1]
-%weights_1 = call_function[operator.truediv](args = (%weights, %sum_1))  # bf16[5, 2]
-%reshape = call_method[reshape](args = (%ids, -1))  # i64[10]
-%sort = call_function[torch.sort](args = (%reshape,))
-%sorted_ids = call_function[operator.getitem](args = (%sort, 0))  # i64[10]
-%permutation = call_function[operator.getitem](args = (%sort, 1))  # i64[10]
-%floordiv = call_function[operator.floordiv](args = (%permutation, 2))  # i64[10]
-%rows = call_function[operator.getitem](args = (%x, %floordiv))  # bf16[10, 8]
-%float_1 = call_method[float](args = (%sorted_ids,))  # f32[10]
-%counts = call_function[torch.histc](args = (%float_1,), kwargs = {bins: 4, min: 0, max: 3})  # f32[4]
-%ends = call_function[torch.cumsum](args = (%counts,), kwargs = {dim: 0, dtype: torch.int32})  # i32[4]
-%matrix = call_method[transpose](args = (%self.gate_up, -2, -1))  # bf16[4, 8, 32]
-%hidden = call_function[torch._grouped_mm](args = (%rows, %matrix), kwargs = {offs: %ends})  # bf16[10, 32]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # bf16[10, 16]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # bf16[10, 16]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # bf16[10, 16]
-%mul = call_function[operator.mul](args = (%silu, %up))  # bf16[10, 16]
-%matrix_1 = call_method[transpose](args = (%self.down, -2, -1))  # bf16[4, 16, 8]
-%out = call_function[torch._grouped_mm](args = (%mul, %matrix_1), kwargs = {offs: %ends})  # bf16[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # bf16[10]
-%getitem_7 = call_function[operator.getitem](args = (%reshape_1, %permutation))  # bf16[10]
-%unsqueeze = call_method[unsqueeze](args = (%getitem_7, -1))  # bf16[10, 1]
-%out_1 = call_function[operator.mul](args = (%out, %unsqueeze))  # bf16[10, 8]
-%inverse = call_function[torch.empty_like](args = (%permutation,))  # i64[10]
-%arange = call_function[torch.arange](args = (10,))  # i64[10]
-%setitem = call_function[operator.setitem](args = (%inverse, %permutation, %arange))
-%getitem_8 = call_function[operator.getitem](args = (%out_1, %inverse))  # bf16[10, 8]
-%view = call_method[view](args = (%getitem_8, 5, 2, 8))  # bf16[5, 2, 8]
-%sum_2 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # bf16[5, 8]
-%to = call_method[to](args = (%sum_2, torch.bfloat16))  # bf16[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, score_dtype: torch.bfloat16, weights_dtype: torch.bfloat16,
+    renormalize: True, num_experts: 4})  # bf16[5, 8]
+return (moe_default,)""")

    def test_grouped_mm_in_out_with_biases(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(GroupedMM, layout="in_out", bias=True)), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # f32[5, 4]
-%scores = call_function[torch.nn.functional.softmax](args = (%linear,), kwargs = {dim: -1})  # f32[5, 4]
-%topk = call_function[torch.topk](args = (%scores, 2), kwargs = {dim: -1})
-%weights = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%sum_1 = call_method[sum](args = (%weights,), kwargs = {dim: -1, keepdim: True})  # f32[5, 1]
-%weights_1 = call_function[operator.truediv](args = (%weights, %sum_1))  # f32[5, 2]
-%reshape = call_method[reshape](args = (%ids, -1))  # i64[10]
-%sort = call_function[torch.sort](args = (%reshape,))
-%sorted_ids = call_function[operator.getitem](args = (%sort, 0))  # i64[10]
-%permutation = call_function[operator.getitem](args = (%sort, 1))  # i64[10]
-%floordiv = call_function[operator.floordiv](args = (%permutation, 2))  # i64[10]
-%rows = call_function[operator.getitem](args = (%x, %floordiv))  # f32[10, 8]
-%float_1 = call_method[float](args = (%sorted_ids,))  # f32[10]
-%counts = call_function[torch.histc](args = (%float_1,), kwargs = {bins: 4, min: 0, max: 3})  # f32[4]
-%ends = call_function[torch.cumsum](args = (%counts,), kwargs = {dim: 0, dtype: torch.int32})  # i32[4]
-%grouped_mm_fallback = call_function[torch.ops.transformers.grouped_mm_fallback](args = (%rows, %self.gate_up,
-    %ends))  # f32[10, 24]
-%getitem_5 = call_function[operator.getitem](args = (%self.gate_up_bias, %sorted_ids))  # f32[10, 24]
-%hidden = call_function[operator.add](args = (%grouped_mm_fallback, %getitem_5))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%grouped_mm_fallback_1 = call_function[torch.ops.transformers.grouped_mm_fallback](args = (%mul, %self.down,
-    %ends))  # f32[10, 8]
-%getitem_8 = call_function[operator.getitem](args = (%self.down_bias, %sorted_ids))  # f32[10, 8]
-%out = call_function[operator.add](args = (%grouped_mm_fallback_1, %getitem_8))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%getitem_9 = call_function[operator.getitem](args = (%reshape_1, %permutation))  # f32[10]
-%unsqueeze = call_method[unsqueeze](args = (%getitem_9, -1))  # f32[10, 1]
-%out_1 = call_function[operator.mul](args = (%out, %unsqueeze))  # f32[10, 8]
-%inverse = call_function[torch.empty_like](args = (%permutation,))  # i64[10]
-%arange = call_function[torch.arange](args = (10,))  # i64[10]
-%setitem = call_function[operator.setitem](args = (%inverse, %permutation, %arange))
-%getitem_10 = call_function[operator.getitem](args = (%out_1, %inverse))  # f32[10, 8]
-%view = call_method[view](args = (%getitem_10, 5, 2, 8))  # f32[5, 2, 8]
-%sum_2 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_2, torch.float32))  # f32[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    %self.gate_up_bias, %self.down, %self.down_bias), kwargs = {top_k: 2, renormalize: True, num_experts: 4,
+    weight_layout: in_out})  # f32[5, 8]
+return (moe_default,)""")

    def test_batched_mm(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(BatchedMM)), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # f32[5, 4]
-%scores = call_function[torch.nn.functional.softmax](args = (%linear,), kwargs = {dim: -1})  # f32[5, 4]
-%topk = call_function[torch.topk](args = (%scores, 2), kwargs = {dim: -1})
-%weights = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%sum_1 = call_method[sum](args = (%weights,), kwargs = {dim: -1, keepdim: True})  # f32[5, 1]
-%weights_1 = call_function[operator.truediv](args = (%weights, %sum_1))  # f32[5, 2]
-%flat = call_method[reshape](args = (%ids, -1))  # i64[10]
-%repeat_interleave = call_method[repeat_interleave](args = (%x, 2), kwargs = {dim: 0})  # f32[10, 8]
-%getitem_2 = call_function[operator.getitem](args = (%self.gate_up, %flat))  # f32[10, 24, 8]
-%unsqueeze = call_method[unsqueeze](args = (%repeat_interleave, -1))  # f32[10, 8, 1]
-%bmm = call_function[torch.bmm](args = (%getitem_2, %unsqueeze))  # f32[10, 24, 1]
-%hidden = call_method[squeeze](args = (%bmm, -1))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%getitem_5 = call_function[operator.getitem](args = (%self.down, %flat))  # f32[10, 8, 12]
-%unsqueeze_1 = call_method[unsqueeze](args = (%mul, -1))  # f32[10, 12, 1]
-%bmm_1 = call_function[torch.bmm](args = (%getitem_5, %unsqueeze_1))  # f32[10, 8, 1]
-%out = call_method[squeeze](args = (%bmm_1, -1))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%unsqueeze_2 = call_method[unsqueeze](args = (%reshape_1, -1))  # f32[10, 1]
-%mul_1 = call_function[operator.mul](args = (%out, %unsqueeze_2))  # f32[10, 8]
-%view = call_method[view](args = (%mul_1, 5, 2, 8))  # f32[5, 2, 8]
-%sum_2 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_2, torch.float32))  # f32[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, renormalize: True, num_experts: 4})  # f32[5, 8]
+return (moe_default,)""")

    def test_batched_mm_in_out_with_biases(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(BatchedMM, layout="in_out", bias=True)), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # f32[5, 4]
-%scores = call_function[torch.nn.functional.softmax](args = (%linear,), kwargs = {dim: -1})  # f32[5, 4]
-%topk = call_function[torch.topk](args = (%scores, 2), kwargs = {dim: -1})
-%weights = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%sum_1 = call_method[sum](args = (%weights,), kwargs = {dim: -1, keepdim: True})  # f32[5, 1]
-%weights_1 = call_function[operator.truediv](args = (%weights, %sum_1))  # f32[5, 2]
-%flat = call_method[reshape](args = (%ids, -1))  # i64[10]
-%repeat_interleave = call_method[repeat_interleave](args = (%x, 2), kwargs = {dim: 0})  # f32[10, 8]
-%unsqueeze = call_method[unsqueeze](args = (%repeat_interleave, 1))  # f32[10, 1, 8]
-%getitem_2 = call_function[operator.getitem](args = (%self.gate_up, %flat))  # f32[10, 8, 24]
-%bmm = call_function[torch.bmm](args = (%unsqueeze, %getitem_2))  # f32[10, 1, 24]
-%squeeze = call_method[squeeze](args = (%bmm, 1))  # f32[10, 24]
-%getitem_3 = call_function[operator.getitem](args = (%self.gate_up_bias, %flat))  # f32[10, 24]
-%hidden = call_function[operator.add](args = (%squeeze, %getitem_3))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%unsqueeze_1 = call_method[unsqueeze](args = (%mul, 1))  # f32[10, 1, 12]
-%getitem_6 = call_function[operator.getitem](args = (%self.down, %flat))  # f32[10, 12, 8]
-%bmm_1 = call_function[torch.bmm](args = (%unsqueeze_1, %getitem_6))  # f32[10, 1, 8]
-%squeeze_1 = call_method[squeeze](args = (%bmm_1, 1))  # f32[10, 8]
-%getitem_7 = call_function[operator.getitem](args = (%self.down_bias, %flat))  # f32[10, 8]
-%out = call_function[operator.add](args = (%squeeze_1, %getitem_7))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%unsqueeze_2 = call_method[unsqueeze](args = (%reshape_1, -1))  # f32[10, 1]
-%mul_1 = call_function[operator.mul](args = (%out, %unsqueeze_2))  # f32[10, 8]
-%view = call_method[view](args = (%mul_1, 5, 2, 8))  # f32[5, 2, 8]
-%sum_2 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_2, torch.float32))  # f32[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    %self.gate_up_bias, %self.down, %self.down_bias), kwargs = {top_k: 2, renormalize: True, num_experts: 4,
+    weight_layout: in_out})  # f32[5, 8]
+return (moe_default,)""")


class TestRouterSpellings(TestCase):
    """The experts are ``BatchedMM``, whose diff is the shortest."""

    maxDiff = None

    def test_softmax_then_topk(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(changed(BatchedMM, route=softmax_router))), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # f32[5, 4]
-%softmax = call_function[torch.nn.functional.softmax](args = (%linear,), kwargs = {dim: -1, dtype:
-    torch.float32})  # f32[5, 4]
-%topk = call_function[torch.topk](args = (%softmax, 2), kwargs = {dim: -1})
-%weights = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%weights_1 = call_method[to](args = (%weights, torch.float32))  # f32[5, 2]
-%flat = call_method[reshape](args = (%ids, -1))  # i64[10]
-%repeat_interleave = call_method[repeat_interleave](args = (%x, 2), kwargs = {dim: 0})  # f32[10, 8]
-%getitem_2 = call_function[operator.getitem](args = (%self.gate_up, %flat))  # f32[10, 24, 8]
-%unsqueeze = call_method[unsqueeze](args = (%repeat_interleave, -1))  # f32[10, 8, 1]
-%bmm = call_function[torch.bmm](args = (%getitem_2, %unsqueeze))  # f32[10, 24, 1]
-%hidden = call_method[squeeze](args = (%bmm, -1))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%getitem_5 = call_function[operator.getitem](args = (%self.down, %flat))  # f32[10, 8, 12]
-%unsqueeze_1 = call_method[unsqueeze](args = (%mul, -1))  # f32[10, 12, 1]
-%bmm_1 = call_function[torch.bmm](args = (%getitem_5, %unsqueeze_1))  # f32[10, 8, 1]
-%out = call_method[squeeze](args = (%bmm_1, -1))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%unsqueeze_2 = call_method[unsqueeze](args = (%reshape_1, -1))  # f32[10, 1]
-%mul_1 = call_function[operator.mul](args = (%out, %unsqueeze_2))  # f32[10, 8]
-%view = call_method[view](args = (%mul_1, 5, 2, 8))  # f32[5, 2, 8]
-%sum_1 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to_1 = call_method[to](args = (%sum_1, torch.float32))  # f32[5, 8]
-return (to_1,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, num_experts: 4})  # f32[5, 8]
+return (moe_default,)""")

    def test_topk_then_softmax(self) -> None:
        self.assertExpectedInline(rewrite_diff(layer(changed(BatchedMM, route=chosen_softmax_router))), """\
-%linear = call_function[torch._C._nn.linear](args = (%x, %self.router))  # f32[5, 4]
-%topk = call_function[torch.topk](args = (%linear, 2), kwargs = {dim: -1})
-%logits = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2]
-%ids = call_function[operator.getitem](args = (%topk, 1))  # i64[5, 2]
-%weights = call_function[torch.nn.functional.softmax](args = (%logits,), kwargs = {dim: -1})  # f32[5, 2]
-%flat = call_method[reshape](args = (%ids, -1))  # i64[10]
-%repeat_interleave = call_method[repeat_interleave](args = (%x, 2), kwargs = {dim: 0})  # f32[10, 8]
-%getitem_2 = call_function[operator.getitem](args = (%self.gate_up, %flat))  # f32[10, 24, 8]
-%unsqueeze = call_method[unsqueeze](args = (%repeat_interleave, -1))  # f32[10, 8, 1]
-%bmm = call_function[torch.bmm](args = (%getitem_2, %unsqueeze))  # f32[10, 24, 1]
-%hidden = call_method[squeeze](args = (%bmm, -1))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%getitem_5 = call_function[operator.getitem](args = (%self.down, %flat))  # f32[10, 8, 12]
-%unsqueeze_1 = call_method[unsqueeze](args = (%mul, -1))  # f32[10, 12, 1]
-%bmm_1 = call_function[torch.bmm](args = (%getitem_5, %unsqueeze_1))  # f32[10, 8, 1]
-%out = call_method[squeeze](args = (%bmm_1, -1))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights, -1))  # f32[10]
-%unsqueeze_2 = call_method[unsqueeze](args = (%reshape_1, -1))  # f32[10, 1]
-%mul_1 = call_function[operator.mul](args = (%out, %unsqueeze_2))  # f32[10, 8]
-%view = call_method[view](args = (%mul_1, 5, 2, 8))  # f32[5, 2, 8]
-%sum_1 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_1, torch.float32))  # f32[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, routing: topk_softmax, num_experts: 4})  # f32[5, 8]
+return (moe_default,)""")

    def test_sigmoid_with_correction_bias_and_groups(self) -> None:
        def prepare(layer: Experts) -> None:
            layer.register_buffer("correction", torch.randn(layer.num_experts))

        spelling = changed(BatchedMM, route=grouped_sigmoid_router, prepare=prepare)
        self.assertExpectedInline(rewrite_diff(layer(spelling)), """\
-%float_1 = call_method[float](args = (%x,))  # f32[5, 8]
-%float_2 = call_method[float](args = (%self.router,))  # f32[4, 8]
-%linear = call_function[torch._C._nn.linear](args = (%float_1, %float_2))  # f32[5, 4]
-%scores = call_method[sigmoid](args = (%linear,))  # f32[5, 4]
-%choice = call_function[operator.add](args = (%scores, %self.correction))  # f32[5, 4]
-%view = call_method[view](args = (%choice, -1, 2, 2))  # f32[5, 2, 2]
-%topk = call_method[topk](args = (%view, 2), kwargs = {dim: -1})
-%getitem = call_function[operator.getitem](args = (%topk, 0))  # f32[5, 2, 2]
-%group_scores = call_method[sum](args = (%getitem,), kwargs = {dim: -1})  # f32[5, 2]
-%topk_1 = call_function[torch.topk](args = (%group_scores,), kwargs = {k: 1, dim: -1, sorted: False})
-%best = call_function[operator.getitem](args = (%topk_1, 1))  # i64[5, 1]
-%zeros_like = call_function[torch.zeros_like](args = (%group_scores,))  # f32[5, 2]
-%mask = call_method[scatter_](args = (%zeros_like, 1, %best, 1))  # f32[5, 2]
-%unsqueeze = call_method[unsqueeze](args = (%mask, -1))  # f32[5, 2, 1]
-%expand = call_method[expand](args = (%unsqueeze, -1, 2, 2))  # f32[5, 2, 2]
-%mask_1 = call_method[reshape](args = (%expand, -1, 4))  # f32[5, 4]
-%bool_1 = call_method[bool](args = (%mask_1,))  # b8[5, 4]
-%invert = call_function[operator.invert](args = (%bool_1,))  # b8[5, 4]
-%choice_1 = call_method[masked_fill](args = (%choice, %invert, -inf))  # f32[5, 4]
-%topk_2 = call_function[torch.topk](args = (%choice_1,), kwargs = {k: 2, dim: -1, sorted: False})
-%ids = call_function[operator.getitem](args = (%topk_2, 1))  # i64[5, 2]
-%weights = call_method[gather](args = (%scores, 1, %ids))  # f32[5, 2]
-%sum_2 = call_method[sum](args = (%weights,), kwargs = {dim: -1, keepdim: True})  # f32[5, 1]
-%add_1 = call_function[operator.add](args = (%sum_2, 1e-20))  # f32[5, 1]
-%truediv = call_function[operator.truediv](args = (%weights, %add_1))  # f32[5, 2]
-%weights_1 = call_function[operator.mul](args = (%truediv, 2.5))  # f32[5, 2]
-%flat = call_method[reshape](args = (%ids, -1))  # i64[10]
-%repeat_interleave = call_method[repeat_interleave](args = (%x, 2), kwargs = {dim: 0})  # f32[10, 8]
-%getitem_6 = call_function[operator.getitem](args = (%self.gate_up, %flat))  # f32[10, 24, 8]
-%unsqueeze_1 = call_method[unsqueeze](args = (%repeat_interleave, -1))  # f32[10, 8, 1]
-%bmm = call_function[torch.bmm](args = (%getitem_6, %unsqueeze_1))  # f32[10, 24, 1]
-%hidden = call_method[squeeze](args = (%bmm, -1))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul_1 = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%getitem_9 = call_function[operator.getitem](args = (%self.down, %flat))  # f32[10, 8, 12]
-%unsqueeze_2 = call_method[unsqueeze](args = (%mul_1, -1))  # f32[10, 12, 1]
-%bmm_1 = call_function[torch.bmm](args = (%getitem_9, %unsqueeze_2))  # f32[10, 8, 1]
-%out = call_method[squeeze](args = (%bmm_1, -1))  # f32[10, 8]
-%reshape_2 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%unsqueeze_3 = call_method[unsqueeze](args = (%reshape_2, -1))  # f32[10, 1]
-%mul_2 = call_function[operator.mul](args = (%out, %unsqueeze_3))  # f32[10, 8]
-%view_1 = call_method[view](args = (%mul_2, 5, 2, 8))  # f32[5, 2, 8]
-%sum_3 = call_method[sum](args = (%view_1,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_3, torch.float32))  # f32[5, 8]
-return (to,)
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, %self.correction,
+    %self.gate_up, None, %self.down, None), kwargs = {top_k: 2, routing: sigmoid_topk, renormalize: True,
+    renormalize_eps: 1e-20, routing_scale: 2.5, num_groups: 2, num_experts: 4})  # f32[5, 8]
+return (moe_default,)""")

    def test_a_router_that_others_read_stays_outside(self) -> None:
        def forward(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = layer.route(x)
            return layer.experts(x, ids, weights), weights.sum()

        self.assertExpectedInline(rewrite_diff(layer(changed(BatchedMM, forward=forward))), """\
-%flat = call_method[reshape](args = (%ids, -1))  # i64[10]
-%repeat_interleave = call_method[repeat_interleave](args = (%x, 2), kwargs = {dim: 0})  # f32[10, 8]
-%getitem_2 = call_function[operator.getitem](args = (%layer.gate_up, %flat))  # f32[10, 24, 8]
-%unsqueeze = call_method[unsqueeze](args = (%repeat_interleave, -1))  # f32[10, 8, 1]
-%bmm = call_function[torch.bmm](args = (%getitem_2, %unsqueeze))  # f32[10, 24, 1]
-%hidden = call_method[squeeze](args = (%bmm, -1))  # f32[10, 24]
-%chunk = call_method[chunk](args = (%hidden, 2), kwargs = {dim: -1})
-%gate = call_function[operator.getitem](args = (%chunk, 0))  # f32[10, 12]
-%up = call_function[operator.getitem](args = (%chunk, 1))  # f32[10, 12]
-%silu = call_function[torch.nn.functional.silu](args = (%gate,))  # f32[10, 12]
-%mul = call_function[operator.mul](args = (%silu, %up))  # f32[10, 12]
-%getitem_5 = call_function[operator.getitem](args = (%layer.down, %flat))  # f32[10, 8, 12]
-%unsqueeze_1 = call_method[unsqueeze](args = (%mul, -1))  # f32[10, 12, 1]
-%bmm_1 = call_function[torch.bmm](args = (%getitem_5, %unsqueeze_1))  # f32[10, 8, 1]
-%out = call_method[squeeze](args = (%bmm_1, -1))  # f32[10, 8]
-%reshape_1 = call_method[reshape](args = (%weights_1, -1))  # f32[10]
-%unsqueeze_2 = call_method[unsqueeze](args = (%reshape_1, -1))  # f32[10, 1]
-%mul_1 = call_function[operator.mul](args = (%out, %unsqueeze_2))  # f32[10, 8]
-%view = call_method[view](args = (%mul_1, 5, 2, 8))  # f32[5, 2, 8]
-%sum_2 = call_method[sum](args = (%view,), kwargs = {dim: 1})  # f32[5, 8]
-%to = call_method[to](args = (%sum_2, torch.float32))  # f32[5, 8]
+%experts_default = call_function[torch.ops.perseus.experts.default](args = (%x, %ids, %weights_1,
+    %layer.gate_up, None, %layer.down, None), kwargs = {num_experts: 4})  # f32[5, 8]
-return (to, sum_3)
+return (experts_default, sum_3)""")


class TestGates(TestCase):
    """The lines of the op alone: what precedes them is the same for every gate."""

    maxDiff = None

    def op_line(self, gate: object) -> str:
        diff = rewrite_diff(layer(changed(BatchedMM, gate=gate)))
        return "\n".join(line for line in diff.splitlines() if line[0] == "+")

    def test_gelu(self) -> None:
        def gate(layer: Experts, hidden: Tensor) -> Tensor:
            gate, up = hidden.chunk(2, dim=-1)
            return up * torch.nn.functional.gelu(gate)

        self.assertExpectedInline(self.op_line(gate), """\
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, renormalize: True, num_experts: 4, activation: gelu})  # f32[5,
+    8]
+return (moe_default,)""")

    def test_gelu_tanh(self) -> None:
        def gate(layer: Experts, hidden: Tensor) -> Tensor:
            gate, up = hidden.chunk(2, dim=-1)
            return torch.nn.functional.gelu(gate, approximate="tanh") * up

        self.assertExpectedInline(self.op_line(gate), """\
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, renormalize: True, num_experts: 4, activation: gelu_tanh})  #
+    f32[5, 8]
+return (moe_default,)""")

    def test_interleaved_clamped_swiglu(self) -> None:
        def gate(layer: Experts, hidden: Tensor) -> Tensor:
            gate, up = hidden[..., ::2], hidden[..., 1::2]
            gate = gate.clamp(min=None, max=7.0)
            up = up.clamp(min=-7.0, max=7.0)
            return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

        self.assertExpectedInline(self.op_line(gate), """\
+%moe_default = call_function[torch.ops.perseus.moe.default](args = (%x, %self.router, None, None, %self.gate_up,
+    None, %self.down, None), kwargs = {top_k: 2, renormalize: True, num_experts: 4, gate_layout: interleaved,
+    activation: clamped_swiglu, activation_params: [1.702, 7.0]})  # f32[5, 8]
+return (moe_default,)""")
