"""The driver that stands in for CUDA's where there is no device."""

from __future__ import annotations

import pytest
from fake_driver import FakeDriver


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))
