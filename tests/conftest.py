"""Rules for all tests: hardware is asked for by marker and found by query; no test sees another's compiled code or
random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def _missing_hardware(item: pytest.Item) -> str | None:
    """Why this test cannot run here, or None."""
    num_gpus = torch.cuda.device_count()
    if item.get_closest_marker("gpu") and num_gpus < 1:
        return "needs an NVIDIA GPU, torch.cuda.device_count() is 0"
    if item.get_closest_marker("gpu2"):
        if num_gpus < 2:
            return f"needs two NVIDIA GPUs, torch.cuda.device_count() is {num_gpus}"
        if not torch.cuda.can_device_access_peer(0, 1):
            return "needs two NVIDIA GPUs that reach each other's memory"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests that are marked exhaustive out, unless ``-m`` asks for them."""
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _missing_hardware(item)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Dynamo counts recompilations per code object, which tests of one Hugging Face class would share."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
