"""The ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from rank_pool import RankPool
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, rank_pools: dict[int, RankPool]) -> RankPool:
    return rank_pools[request.param]


@pytest.fixture
def two_ranks(rank_pools: dict[int, RankPool]) -> RankPool:
    return rank_pools[2]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of two ranks, this process the first, that moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()
