"""What every rank checks of models whose parameters are spread over the ranks: FSDP and DTensor."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from eager_twin import Outcome, outcome_of, weighted_sum
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from perseus_compile import observe
from perseus_compile.backend import perseus
from perseus_compile.testing.models import tiny_causal_lm

SPELLINGS: dict[str, type[Experts]] = {"grouped_mm": GroupedMM, "batched_mm": BatchedMM}
PLACEMENTS: dict[str, Placement] = {"replicated": Replicate(), "sharded": Shard(0)}


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _tokens(rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))


def _assert_mean_gradients(sharded: nn.Module, whole: nn.Module) -> None:
    """FSDP averages over the ranks, each of which has seen its own tokens."""
    for (name, actual), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(actual.grad, DTensor) and expected.grad is not None
        mean = expected.grad / dist.get_world_size()
        torch.testing.assert_close(actual.grad.full_tensor(), mean, rtol=1e-4, atol=1e-5, msg=f"gradient of {name}")


def fully_sharded_block(spelling: str, *, compile_each: bool) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), SPELLINGS[spelling](bias=True))
    whole = copy.deepcopy(model)
    for module in (model[1], model):
        fully_shard(module, mesh=_mesh())
    for module in model if compile_each else (model,):
        module.compile(backend=perseus, options={"inner": "aot_eager"})
    with observe.collect() as graphs:
        loss = weighted_sum(model(_tokens(dist.get_rank())))
        loss.backward()
    losses = [weighted_sum(whole(_tokens(rank))) for rank in range(dist.get_world_size())]
    sum(losses).backward()
    torch.testing.assert_close(loss, losses[dist.get_rank()])
    _assert_mean_gradients(model, whole)
    return outcome_of(graphs)


def fully_sharded_model(model_type: str) -> Outcome:
    """A Hugging Face model, a shard group per decoder layer as training scripts have it."""
    model = tiny_causal_lm(model_type, num_layers=2).train()
    whole = copy.deepcopy(model)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=_mesh())
    model.compile(backend=perseus, options={"inner": "aot_eager"})
    ids = [torch.arange(12).view(2, 6) + 12 * rank for rank in range(dist.get_world_size())]
    with observe.collect() as graphs:
        mine = ids[dist.get_rank()]
        model(mine, labels=mine, use_cache=False).loss.backward()
    for each in ids:
        whole(each, labels=each, use_cache=False).loss.backward()
    _assert_mean_gradients(model, whole)
    return outcome_of(graphs)


class ToLocal(BatchedMM):
    """Takes the local part of its expert weights before it uses them."""

    def linear(self, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        return super().linear(rows, weight.to_local() if isinstance(weight, DTensor) else weight, ids, ends)


class FromLocal(BatchedMM):
    """Makes a distributed tensor of local tokens."""

    def prepare(self) -> None:
        self.mesh = _mesh()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(DTensor.from_local(x, self.mesh, [Replicate()])).to_local()


def _distribute(layer: Experts, names: tuple[str, ...], placement: str) -> None:
    for name in names:
        whole = getattr(layer, name).detach()
        setattr(layer, name, nn.Parameter(distribute_tensor(whole, _mesh(), [PLACEMENTS[placement]])))


def _compiled_against_eager(layer: Experts, x: Tensor) -> Outcome:
    expected = layer(x)
    expected = expected.full_tensor() if isinstance(expected, DTensor) else expected
    with observe.collect() as graphs:
        actual = torch.compile(layer, backend=perseus, options={"inner": "eager"})(x)
    torch.testing.assert_close(actual.full_tensor() if isinstance(actual, DTensor) else actual, expected)
    return outcome_of(graphs)


def distributed_layer(placement: str) -> Outcome:
    """Parameters and tokens are distributed tensors from end to end."""
    torch.manual_seed(0)
    layer = BatchedMM()
    _distribute(layer, ("router", "gate_up", "down"), placement)
    return _compiled_against_eager(layer, distribute_tensor(_tokens(0), _mesh(), [Replicate()]))


def distributed_inside() -> Outcome:
    """Only inside the layer are the tokens a distributed tensor."""
    torch.manual_seed(0)
    layer = FromLocal()
    _distribute(layer, ("router", "gate_up", "down"), "replicated")
    return _compiled_against_eager(layer, _tokens(0))


def local_weights() -> Outcome:
    torch.manual_seed(0)
    layer = ToLocal()
    _distribute(layer, ("gate_up", "down"), "replicated")
    return _compiled_against_eager(layer, _tokens(0))


def written_while_distributed() -> Outcome:
    """A write to a distributed tensor could reach the local part that the experts read."""
    torch.manual_seed(0)

    class Scaled(ToLocal):
        def tokens(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.mul_(2.0)
            return x * self.scale.to_local().sum()

    layer = Scaled()
    layer.scale = nn.Parameter(torch.ones(2))
    _distribute(layer, ("gate_up", "down", "scale"), "replicated")
    twin = copy.deepcopy(layer)
    with observe.collect() as graphs:
        actual = torch.compile(layer, backend=perseus, options={"inner": "eager"})(_tokens(0))
    torch.testing.assert_close(actual, twin(_tokens(0)))
    return outcome_of(graphs)
