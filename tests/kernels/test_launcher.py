"""Does a launch get its own addresses, maps and control block, and do failures say what to do? The driver is a fake."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver

from perseus_compile import _C
from perseus_compile.errors import LaunchError


class Params(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint32), *((name, ctypes.c_uint64) for name in ("x", "rows", "control"))]


WORDS, STRIDE, CAPACITY = 1 << 20, 2048, 64
NUM_ADDRESSES = 2  # x, workspace
X, WORKSPACE, CONTROL, FIXED = 0, 1, 2, 3
ROWS_OFFSET, HIDDEN_OFFSET = 768, 4096
FUNCTION, CONTEXT = 0xF00, 0xC00
FIXED_MAP = (FIXED, 0xABC0, (64, 8, 1, 4), (128, 16, 1024), (64, 8, 1, 1))
MOVING_MAP = (WORKSPACE, HIDDEN_OFFSET, (64, 100), (128,), (64, 32))


class Site:
    """A call site with one fixed map and one in the workspace."""

    def __init__(self, fake: FakeDriver) -> None:
        self.driver = fake.path
        self.error = torch.zeros(6, dtype=torch.int32)
        fake.reset(Params, num_maps=2)
        self.blocks = _C.ControlBlocks(
            words=WORDS, stride_bytes=STRIDE, capacity=CAPACITY, error=self.error.data_ptr(), driver=fake.path
        )
        self.launcher = self.make()

    def make(self, **changes: Any) -> _C.KernelLauncher:
        arguments: dict[str, Any] = {
            "function": FUNCTION,
            "context": CONTEXT,
            "params": bytes(Params(number=77)),
            "patches": [
                (Params.x.offset, X, 0),
                (Params.rows.offset, WORKSPACE, ROWS_OFFSET),
                (Params.control.offset, CONTROL, 0),
            ],
            "tensor_maps": [FIXED_MAP, MOVING_MAP],
            "num_addresses": NUM_ADDRESSES,
            "grid": 132,
            "threads": 384,
            "shared_bytes": 200_000,
            "control": self.blocks,
            "driver": self.driver,
        }
        return _C.KernelLauncher(**{**arguments, **changes})


@pytest.fixture
def site(fake: FakeDriver) -> Site:
    return Site(fake)


def test_a_launch_is_what_was_prepared_and_the_addresses_of_the_call(fake: FakeDriver, site: Site) -> None:
    assert site.launcher.launch(7, 0x1000, 0x20000)
    (launch,) = fake.launches
    assert (launch.function, launch.stream) == (FUNCTION, 7)
    assert (list(launch.grid), list(launch.block)) == ([132, 1, 1], [384, 1, 1])
    assert (launch.shared_bytes, launch.num_attributes) == (200_000, 0)
    params = launch.read_params(Params)
    assert (params.number, params.x, params.rows, params.control) == (77, 0x1000, 0x20000 + ROWS_OFFSET, WORDS)
    fixed, moving = launch.maps[:2]
    assert (fixed.address, fixed.rank, moving.address, moving.rank) == (0xABC0, 4, 0x20000 + HIDDEN_OFFSET, 2)
    assert (tuple(fixed.sizes), tuple(fixed.strides), tuple(fixed.box)) == FIXED_MAP[2:]
    assert (tuple(moving.sizes[:2]), tuple(moving.strides[:1]), tuple(moving.box[:2])) == MOVING_MAP[2:]
    assert (moving.dtype, moving.swizzle) == (9, 3)  # BF16, 128 bytes
    assert fake.num_misaligned == 0


def test_maps_are_encoded_when_their_address_changes(fake: FakeDriver, site: Site) -> None:
    assert fake.num_encoded == 1, "the fixed map, when the site is made"
    encoded = []
    for workspace in (0x20000, 0x20000, 0x30000, 0x20000):
        site.launcher.launch(7, 0x1000, workspace)
        encoded.append(fake.num_encoded)
    assert encoded == [2, 2, 3, 4]
    assert [launch.maps[1].address - HIDDEN_OFFSET for launch in fake.launches] == [0x20000, 0x20000, 0x30000, 0x20000]
    assert {launch.maps[0].address for launch in fake.launches} == {0xABC0}


def test_a_map_that_fails_is_not_taken_for_encoded(fake: FakeDriver, site: Site) -> None:
    site.launcher.launch(7, 0x1000, 0x20000)
    fake.fail(encode=1)
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"encoding a tensor map with sizes=\[64, 100\], strides=\[128\], box="):
            site.launcher.launch(7, 0x1000, 0x30000)
    site.launcher.launch(7, 0x1000, 0x20000)
    assert [launch.maps[1].address for launch in fake.launches] == [0x20000 + HIDDEN_OFFSET] * 2
    fake.fail(encode=1)
    with pytest.raises(LaunchError, match=r"encoding a tensor map with sizes=\[64, 8, 1, 4\]"):
        site.make()  # the map of a fixed address, before any launch


def test_a_block_per_stream_and_per_capture(fake: FakeDriver, site: Site) -> None:
    def control(stream: int) -> int:
        site.launcher.launch(stream, 0x1000, 0x20000)
        return int(fake.launches[-1].read_params(Params).control)

    eager = [control(stream) for stream in (7, 8, 7, 8)]
    fake.capture(7, 1)
    first_graph = [control(stream) for stream in (7, 8, 7)]
    fake.capture(7, 2)
    second_graph = control(7)
    assert eager == [WORDS, WORDS + STRIDE] * 2
    assert first_graph == [WORDS + 2 * STRIDE, WORDS + STRIDE, WORDS + 2 * STRIDE]
    assert second_graph == WORDS + 3 * STRIDE
    assert site.blocks.num_used == 4
    assert site.blocks.address(8) == WORDS + STRIDE


def test_too_many_streams_say_what_to_do(fake: FakeDriver, site: Site) -> None:
    for stream in range(CAPACITY):
        site.launcher.launch(stream, 0x1000, 0x20000)
    with pytest.raises(LaunchError, match=f"at most {CAPACITY} streams and graphs .* re-use streams"):
        site.launcher.launch(CAPACITY, 0x1000, 0x20000)
    assert site.launcher.launch(0, 0x1000, 0x20000)
    assert len(fake.launches) == CAPACITY + 1


def test_nothing_is_launched_after_a_deadline_until_the_record_is_cleared(fake: FakeDriver, site: Site) -> None:
    site.error[0] = 2
    assert site.blocks.expired
    assert not site.launcher.launch(7, 0x1000, 0x20000)
    assert fake.launches == []
    site.error.zero_()
    assert site.launcher.launch(7, 0x1000, 0x20000) and not site.blocks.expired


def test_threads_may_launch_the_same_site(fake: FakeDriver, site: Site) -> None:
    num_threads, num_launches = 8, 300
    start = threading.Barrier(num_threads)

    def work(thread: int) -> None:
        start.wait()
        for turn in range(num_launches):
            own = (thread + 1) << 32
            stream = thread if turn % 2 else 100 + turn % 20
            assert site.launcher.launch(stream, own, own + 0x1000 * (turn % 3))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = fake.launches
    assert len(launches) == num_threads * num_launches
    control_of_stream = {}
    for launch in launches:
        params = launch.read_params(Params)
        workspace = params.rows - ROWS_OFFSET
        assert launch.maps[1].address == workspace + HIDDEN_OFFSET, "the map of another launch"
        assert params.x == workspace >> 32 << 32, "the address of another thread"
        assert control_of_stream.setdefault(launch.stream, params.control) == params.control
        assert launch.context == CONTEXT, "a thread without a context"
    assert len(set(control_of_stream.values())) == len(control_of_stream) == site.blocks.num_used == 8 + 10
    assert fake.num_misaligned == 0


def test_a_refused_launch_names_the_error(fake: FakeDriver, site: Site) -> None:
    fake.fail(launch=700)
    text = (
        r"launching 132 CTAs of 384 threads with 200000 bytes of shared memory must succeed, got CUDA error 700 "
        r"\(an illegal memory access was encountered\); look for the first CUDA error"
    )
    with pytest.raises(LaunchError, match=text):
        site.launcher.launch(7, 0x1000, 0x20000)
    fake.fail(launch=1)
    with pytest.raises(LaunchError, match=r"CUDA error 1 \(unknown error\)"):
        site.launcher.launch(7, 0x1000, 0x20000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patches": [(25, X, 0)]}, "must lie in the 32 bytes of the parameters, got one at 25"),
        ({"patches": [(8, 4, 0)]}, "a base must be one of 2 addresses.* got 4"),
        ({"control": None}, "a base must be one of 2 addresses.* got 2"),
        ({"tensor_maps": [(FIXED, 0, (64, 8), (128, 16), (64, 8))]}, "one stride less, got 2 and 2"),
        ({"params": bytes(2000)}, "1024 bytes of parameters.* got 2000"),
    ],
)
def test_a_site_that_cannot_be_is_refused(site: Site, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        site.make(**changes)


def test_a_launch_brings_an_address_per_base(fake: FakeDriver, site: Site) -> None:
    for addresses in ((1,), (1, 2, 3), range(40)):
        with pytest.raises(ValueError, match=rf"must bring 2 addresses, got {len(addresses)}"):
            site.launcher.launch(7, *addresses)
    assert fake.launches == []


def test_without_a_driver_the_package_imports_and_the_error_says_what_to_do() -> None:
    program = """
import perseus_compile
from perseus_compile import _C
try:
    _C.ControlBlocks(words=0, stride_bytes=1, capacity=1, error=0, driver="libno_such_driver.so.1")
except perseus_compile.errors.LaunchError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the CUDA driver library libno_such_driver.so.1 must be loadable, got ")
    assert "install a driver or run on CPU" in done.stdout


def test_a_library_that_is_no_driver_is_refused() -> None:
    with pytest.raises(LaunchError, match="must have cuGetErrorString, got a library without it"):
        _C.ControlBlocks(words=0, stride_bytes=1, capacity=1, error=0, driver="libm.so.6")
