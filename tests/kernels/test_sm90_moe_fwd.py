"""Does the fused kernel compute the experts, whatever the shape, the routing and the company it runs in?"""

from __future__ import annotations

import functools
import types

import pytest
import torch
from moe_case import TOLERANCE, Case, make_case, reference, relative_error
from sm_holder import hold_sms

from perseus_compile import fused_experts, grouped
from perseus_compile.errors import LaunchError, PeerTimeout
from perseus_compile.jit import abi, compiler
from perseus_compile.jit.moe_kernel import MoeKernel, check, control_blocks
from perseus_compile.jit.spec import TILE_CONFIGS, spec_for
from perseus_compile.launch_cuda import CudaExperts

pytestmark = pytest.mark.gpu
TILES = tuple(TILE_CONFIGS)


@functools.cache
def _kernel(tiles: str, weight_layout: str, gate_layout: str, activation: str) -> MoeKernel:
    torch.backends.cuda.matmul.allow_tf32 = False
    variant = spec_for(tiles, weight_layout=weight_layout, gate_layout=gate_layout, activation=activation)
    return MoeKernel(compiler.build(variant), 0)


def _run(tiles: str, case: Case, **options: object) -> torch.Tensor:
    """One call on a workspace full of NaN."""
    spec = case.spec
    kernel = _kernel(tiles, spec.weight_layout, spec.gate_layout, spec.activation)
    layout = abi.workspace_layout(
        num_tokens=case.x.shape[0],
        top_k=case.ids.shape[1],
        num_local_experts=case.gate_up.shape[0],
        model_width=case.x.shape[1],
        expert_width=case.down.shape[2 if spec.weight_layout == "out_in" else 1],
        max_tokens_per_tile=kernel.max_tokens,
    )
    workspace = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    prepared = kernel.prepare(*case.args, spec, **options)  # type: ignore[arg-type]
    return prepared.run(case.x, case.ids, case.weights, workspace)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((256, 192, 4, 1, 1), id="one-token"),
        pytest.param((2048, 768, 128, 8, 2), id="two-tokens"),
        pytest.param((200, 72, 5, 3, 17), id="tails"),
        pytest.param((512, 320, 16, 4, 64), id="small"),
        pytest.param((1024, 512, 8, 2, 1500), id="many-rows"),
        pytest.param((72, 1000, 300, 8, 700), id="odd-widths"),
        pytest.param((2880, 2880, 8, 4, 60), id="gpt-oss-widths"),
        pytest.param((256, 128, 1024, 32, 4097), id="most-experts-and-choices"),
    ],
)
def test_matches_float32(tiles: str, shape: tuple[int, ...]) -> None:
    case = make_case(*shape)
    actual = _run(tiles, case)
    assert relative_error(actual, reference(case)) < TOLERANCE
    assert torch.equal(actual, _run(tiles, case)), "a second run gave other bits"


FORMS = [
    ("in_out", "concatenated", "silu"),
    ("in_out", "interleaved", "clamped_swiglu"),
    ("out_in", "interleaved", "gelu_tanh"),
    ("out_in", "concatenated", "gelu"),
    ("out_in", "interleaved", "clamped_swiglu"),
]


@pytest.mark.parametrize("tiles", ["few16", "many128"])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bias": True}, id="bias"),
        pytest.param(
            {"bias": True, "weight_on": "input", "id_dtype": torch.int32, "weight_dtype": torch.bfloat16},
            id="weight-on-input",
        ),
        pytest.param({"expert_offset": 3, "local_experts": 4}, id="some-experts-elsewhere"),
    ],
)
def test_forms(tiles: str, form: tuple[str, str, str], options: dict[str, object]) -> None:
    weight_layout, gate_layout, activation = form
    for shape in ((200, 72, 8, 3, 17), (1024, 520, 8, 2, 900)):
        case = make_case(
            *shape,
            weight_layout=weight_layout,
            gate_layout=gate_layout,
            activation=activation,
            **options,  # type: ignore[arg-type]
        )
        assert relative_error(_run(tiles, case), reference(case)) < TOLERANCE


@pytest.mark.parametrize("tiles", ["few16", "few64", "many128"])
class TestRouting:
    """One layer, many routings."""

    @pytest.fixture
    def case(self) -> Case:
        return make_case(512, 256, 16, 4, 333)

    def test_all_to_one_expert(self, tiles: str, case: Case) -> None:
        skewed = case.with_ids(torch.full_like(case.ids, 3))
        assert relative_error(_run(tiles, skewed), reference(skewed)) < TOLERANCE

    def test_duplicates_add(self, tiles: str, case: Case) -> None:
        ids = case.ids.clone()
        ids[:, 1] = ids[:, 0]
        assert relative_error(_run(tiles, case.with_ids(ids)), reference(case.with_ids(ids))) < TOLERANCE

    def test_ids_out_of_range_are_skipped(self, tiles: str, case: Case) -> None:
        ids = case.ids.clone()
        ids[::2, 1], ids[1::3, 2], ids[7], ids[8, 0] = -1, 16, 2**40, -(2**40)
        actual = _run(tiles, case.with_ids(ids))
        assert relative_error(actual, reference(case.with_ids(ids))) < TOLERANCE
        assert actual[7].count_nonzero() == 0

    def test_nobody_is_local(self, tiles: str, case: Case) -> None:
        assert _run(tiles, case.with_ids(torch.full_like(case.ids, 99))).count_nonzero() == 0

    def test_bad_rows_stay_in_their_tokens(self, tiles: str, case: Case) -> None:
        clean = _run(tiles, case)
        x = case.x.clone()
        x[5, 3], x[99, 0] = float("nan"), float("inf")
        case.x = x
        actual = _run(tiles, case)
        others = torch.ones(333, dtype=torch.bool, device="cuda")
        others[[5, 99]] = False
        assert torch.equal(actual[others], clean[others])
        assert actual[5].isnan().all() and not actual[99].isfinite().any()

    def test_replay_with_new_routing(self, tiles: str, case: Case) -> None:
        routings = [case.ids, torch.full_like(case.ids, 2), case.ids.flip(0), torch.full_like(case.ids, -1), case.ids]
        static = case.with_ids(case.ids.clone())
        spec = case.spec
        kernel = _kernel(tiles, spec.weight_layout, spec.gate_layout, spec.activation)
        prepared = kernel.prepare(*static.args, spec)  # type: ignore[arg-type]
        prepared.run(static.x, static.ids, static.weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = prepared.run(static.x, static.ids, static.weights)
        for ids in routings:
            static.ids.copy_(ids)
            graph.replay()
            assert torch.equal(out, _run(tiles, case.with_ids(ids)))

    def test_two_streams_at_once(self, tiles: str, case: Case) -> None:
        expected = _run(tiles, case)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        outs = []
        for _ in range(4):
            for stream in streams:
                with torch.cuda.stream(stream):
                    outs.append(_run(tiles, case))
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17, 4097])
def test_token_counts(num_tokens: int) -> None:
    case = make_case(256, 128, 32, 4, num_tokens)
    actual = fused_experts.run_experts(*case.args, case.spec)  # type: ignore[arg-type]
    assert actual is not None and actual.shape == case.x.shape
    if num_tokens:
        assert relative_error(actual, reference(case)) < TOLERANCE


def test_many_layers_and_graphs_share_few_control_blocks() -> None:
    """A block per stream and per graph, not per call; graphs replayed at the same time do not share one."""
    case = make_case(512, 256, 16, 4, 700)
    expected = _run("few64", case)
    kernel = _kernel("few64", "out_in", "concatenated", "silu")
    prepared = kernel.prepare(*case.args, case.spec)  # type: ignore[arg-type]
    graphs, outs = [], []
    before = control_blocks(0).num_used
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs += [prepared.run(case.x, case.ids, case.weights) for _ in range(5)]
        graphs.append(graph)
    assert control_blocks(0).num_used - before == len(graphs)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(4):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_longest_list() -> None:
    case = make_case(64, 64, 8, 8, 131072)
    assert relative_error(_run("many128", case), reference(case)) < TOLERANCE


def test_strided_rows() -> None:
    case = make_case(256, 192, 8, 2, 40)
    case.x = torch.randn(40, 304, device="cuda").bfloat16()[:, 16:272]
    assert relative_error(_run("few16", case), reference(case)) < TOLERANCE


@pytest.mark.parametrize("num_column_groups", [1, 2, 3, 8])
def test_column_groups(num_column_groups: int) -> None:
    case = make_case(2112, 128, 8, 2, 1100)
    assert relative_error(_run("many128", case, num_column_groups=num_column_groups), reference(case)) < TOLERANCE


@pytest.mark.parametrize("tiles", ["few16", "many128"])
@pytest.mark.parametrize("num_held", [1, 100])
def test_runs_while_another_stream_holds_sms(tiles: str, num_held: int) -> None:
    """The grid is as large as the GPU; CTAs that find no place must not be needed by those that do."""
    case = make_case(512, 256, 16, 4, 2000)
    expected = _run(tiles, case)
    with hold_sms(num_held) as is_held:
        actual = _run(tiles, case)
        torch.cuda.current_stream().synchronize()
        assert is_held(), "the other kernel ended first: nothing was tested"
    assert torch.equal(actual, expected)


def test_deadline_gives_nan_and_an_error() -> None:
    """A chunk of the sort that nobody claims is never counted: everybody waits for it."""
    case = make_case(512, 256, 16, 4, 2000)
    expected = _run("few16", case)
    blocks = control_blocks(0)
    address = blocks.address(torch.cuda.current_stream().cuda_stream)
    row = (address - blocks.words.data_ptr()) // (blocks.words.stride(0) * 4)
    blocks.words[row, 0] = 1  # sort_claim
    out = _run("few16", case, deadline_ns=20_000_000)
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(PeerTimeout, match=r"waiting for (counting|sorting) rows"):
        _run("few16", case)
    assert torch.equal(_run("few16", case), expected), "control words were left dirty"


def test_check_reports_a_replay_that_ran_out_of_time() -> None:
    case = make_case(512, 256, 16, 4, 2000)
    kernel = _kernel("few16", "out_in", "concatenated", "silu")
    prepared = kernel.prepare(*case.args, case.spec, deadline_ns=20_000_000)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prepared.run(case.x, case.ids, case.weights)
    blocks = control_blocks(0)
    blocks.words[blocks.num_used - 1, 0] = 1  # sort_claim of the block that the capture took
    graph.replay()
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(PeerTimeout, match=r"waiting for (counting|sorting) rows"):
        check()
    graph.replay()
    torch.cuda.synchronize()
    check()
    assert torch.equal(out, _run("few16", case))


def test_first_call_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(256, 128, 8, 2, 5)
    monkeypatch.setattr(fused_experts, "_kernels", {})
    with (
        pytest.raises(LaunchError, match="call once with this token count before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        fused_experts.run_experts(*case.args, case.spec)  # type: ignore[arg-type]
    actual = fused_experts.run_experts(*case.args, case.spec)  # type: ignore[arg-type]
    assert actual is not None and relative_error(actual, reference(case)) < TOLERANCE


@pytest.mark.gpu2
def test_other_device_than_the_current_one() -> None:
    case = make_case(256, 128, 8, 2, 50)
    args = [None if one is None else one.to("cuda:1") for one in case.args]
    assert torch.cuda.current_device() == 0
    experts = CudaExperts(types.SimpleNamespace(experts=case.spec))  # type: ignore[arg-type]
    actual = experts.plan(*args).forward(*args)  # type: ignore[arg-type]
    assert torch.cuda.current_device() == 0
    assert relative_error(actual.to("cuda:0"), reference(case)) < TOLERANCE


@pytest.mark.parametrize("form", [("out_in", "concatenated", "silu"), *FORMS], ids="-".join)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_plain_path_means_the_same(form: tuple[str, str, str], weight_on: str) -> None:
    weight_layout, gate_layout, activation = form
    case = make_case(
        *(256, 192, 12, 3, 130),
        bias=True,
        weight_layout=weight_layout,
        gate_layout=gate_layout,
        activation=activation,
        weight_on=weight_on,
        expert_offset=2,
        local_experts=7,
    )
    actual = grouped.forward(*case.args, case.spec)  # type: ignore[arg-type]
    assert (
        relative_error(actual, reference(case)) < 1.5 * TOLERANCE
    )  # hidden values are rounded before the activation too
