"""How does an experts module become one whose experts are spread over the ranks of a process group?"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from perseus_compile.comm.group import RankGroup
from perseus_compile.facts import ParallelSpec
from perseus_compile.read_experts import ExpertsReading


class ShardedExperts(nn.Module):
    """The experts of one layer, of which this process holds the slice that belongs to its rank.

    Every rank calls it with tokens of its own; it is one ``perseus::experts_parallel``. Its parameters have the names
    that they had. ``state_dict`` gathers the whole tensors, so all ranks must call it; ``load_state_dict`` takes the
    whole tensors and keeps this rank's slice.
    """

    def __init__(self, experts: nn.Module, reading: ExpertsReading, group: RankGroup, max_tokens_per_rank: int) -> None:
        super().__init__()
        num_experts = reading.spec.num_experts
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.group = group
        self._first_expert = self.num_local_experts * group.rank
        self._names = reading.parameters
        spec = ParallelSpec(group_name=group.name, tokens="split", max_tokens_per_rank=max_tokens_per_rank)
        placed = dataclasses.replace(reading.spec, expert_offset=self._first_expert)
        self._numbers = {**placed.as_kwargs(), **spec.as_kwargs()}
        for name in filter(None, reading.parameters):
            whole = experts.get_parameter(name)
            self.register_parameter(name, nn.Parameter(self._slice(whole.detach()), whole.requires_grad))
        self.register_state_dict_post_hook(_gather_parameters)
        self.register_load_state_dict_pre_hook(_keep_slices)
        self.train(experts.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the experts that it replaces: the weighted sum [T, D] for tokens [T, D], ids and weights [T, K]."""
        tensors = [None if name is None else getattr(self, name) for name in self._names]
        return torch.ops.perseus.experts_parallel(hidden_states, top_k_index, top_k_weights, *tensors, **self._numbers)

    def extra_repr(self) -> str:
        last = self._first_expert + self.num_local_experts - 1
        return f"experts {self._first_expert} to {last} of {self.num_experts}, group={self.group.name!r}"

    def _slice(self, whole: Tensor) -> Tensor:
        """This rank's experts, in memory of their own."""
        return whole.narrow(0, self._first_expert, self.num_local_experts).clone()


def _gather_parameters(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    assert isinstance(module, ShardedExperts)
    collectives = torch.ops._c10d_functional
    for name, local in module.named_parameters(recurse=False):
        gathered = collectives.all_gather_into_tensor(local.detach().contiguous(), module.group.size, module.group.name)
        state_dict[prefix + name] = collectives.wait_tensor(gathered)


def _keep_slices(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, ShardedExperts)
    for name, _ in module.named_parameters(recurse=False):
        whole = state_dict.get(prefix + name)
        if isinstance(whole, Tensor) and whole.shape[:1] == (module.num_experts,):
            state_dict[prefix + name] = module._slice(whole)
