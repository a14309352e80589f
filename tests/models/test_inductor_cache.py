"""Compiled artefacts outlive the process: a second process finds the graph in Inductor's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import json
import torch
from torch._dynamo.utils import counters
from perseus_compile.testing.models import tiny_causal_lm

block = tiny_causal_lm("qwen3_moe").model.layers[0].mlp.eval()
x = torch.randn(1, 8, 64)
with torch.no_grad():
    expected = block(x)
    block.compile(backend="perseus", dynamic=True)
    assert torch.allclose(block(x), expected, atol=1e-5)
print(json.dumps({
    "rewrites": counters["perseus"]["rewrites"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"],
}))
"""


def _run(cache: Path) -> dict[str, int]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_second_process_reuses_the_compiled_graph(tmp_path: Path) -> None:
    first, second = _run(tmp_path), _run(tmp_path)
    assert first["rewrites"] == second["rewrites"] == 1
    assert first["bypasses"] == second["bypasses"] == 0
    assert first["hits"] == 0 and first["misses"] >= 1
    assert second["hits"] >= 1 and second["misses"] == 0
