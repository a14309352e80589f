"""What every rank checks of the op as an op: torch's contract, and one node in a compiled graph for any token count."""

from __future__ import annotations

import torch
import torch.distributed as dist
from op_checks import part_of, random_ids, run, whole_case
from torch._dynamo.testing import CompileCounterWithBackend

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_contract(tokens: str) -> None:
    case = part_of(whole_case(random_ids([5])), None).leaves()
    numbers = {**case.numbers, "group_name": dist.group.WORLD.group_name, "tokens": tokens}
    torch.library.opcheck(torch.ops.perseus.experts_parallel, case.tensors, numbers, test_utils=ALL)
    constants = [None if tensor is None else tensor.detach() for tensor in case.tensors]
    backward = (torch.ones_like(case["x"]), *constants, [True] * 6)
    torch.library.opcheck(torch.ops.perseus.experts_parallel_backward, backward, numbers, test_utils=ALL)


def check_one_graph_for_all_token_counts() -> None:
    """Inductor, forward and backward; counts that differ between ranks and from call to call."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda case: run(case) * 2, backend=counter, dynamic=True)
    for step in range(4):
        num_tokens = [2 + step, *([5 - step] * (dist.get_world_size() - 1))]
        case = part_of(whole_case(random_ids(num_tokens)), num_tokens)
        eager, captured = case.leaves(), case.leaves()
        expected, actual = run(eager) * 2, compiled(captured)
        torch.testing.assert_close(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
        for mine, other in zip(captured.required(), eager.required(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    assert counter.frame_count == 1
