"""Is what was tuned what the next process finds, and is everything else a miss?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from measured_rows import shape_of

from perseus_compile import env, ops, tuned
from perseus_compile.cuda_cost import PLAIN, Candidate

FEW16 = Candidate(path="fused", tiles="few16", column_groups=1)
TIMES: tuned.Timed = ((FEW16, 0.25), (PLAIN, 0.5))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU by name, an empty folder, and nothing in the memory of the process."""
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("NVIDIA H200", "NVIDIA H100")[index])
    monkeypatch.setattr(tuned, "driver_version", lambda: "580.1")
    _new_process()
    yield
    _new_process()


def _new_process() -> None:
    tuned.key_of.cache_clear()
    tuned._entries.cache_clear()
    tuned._versions.cache_clear()


def _key(num_tokens: int = 64, device_index: int = 0) -> tuned.Key:
    return tuned.key_of(shape_of("olmoe", num_tokens), device_index)


def test_next_process_finds_it() -> None:
    assert tuned.lookup(_key()) is None
    path = tuned.record(_key(), TIMES)
    assert path is not None and path.parent == tuned.folder()
    assert tuned.lookup(_key()) == TIMES
    _new_process()
    assert tuned.lookup(_key()) == TIMES
    assert [one.name for one in tuned.folder().iterdir()] == [path.name], "temporary files were left"


def test_other_keys_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.record(_key(), TIMES)
    assert tuned.lookup(_key(128)) is None
    assert tuned.lookup(_key(device_index=1)) is None
    assert tuned.lookup(tuned.key_of(shape_of("gpt-oss-120b-as-is", 64), 0)) is None
    _new_process()
    monkeypatch.setattr(tuned, "driver_version", lambda: "590.1")
    assert tuned.lookup(_key()) is None


def test_entries_of_other_versions_stay_and_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.record(_key(), TIMES)
    _new_process()
    monkeypatch.setattr(tuned, "headers_digest", lambda: "other headers")
    assert tuned.lookup(_key()) is None
    tuned.record(_key(), ((PLAIN, 0.1),))
    assert len(list(tuned.folder().iterdir())) == 2
    monkeypatch.undo()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],
        lambda text: "[]",
        lambda text: "",
        lambda text: text.replace("few16", "few17"),
        lambda text: text.replace("0.25", "-1"),
        lambda text: text.replace("0.25", "null"),
        lambda text: text.replace('"column_groups": 1', '"column_groups": 99'),
        lambda text: text.replace('"tiles"', '"tile"'),
    ],
)
def test_damaged_file_is_a_miss_with_one_warning(damage: object, caplog: pytest.LogCaptureFixture) -> None:
    path = tuned.record(_key(), TIMES)
    other = tuned.record(_key(128), TIMES)
    assert path is not None and other is not None
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    _new_process()
    assert tuned.lookup(_key()) is None
    assert tuned.lookup(_key()) is None
    assert tuned.lookup(_key(128)) == TIMES
    assert len(caplog.records) == 1 and path.name in caplog.text


def test_file_with_another_key_layout_is_a_miss() -> None:
    path = tuned.record(_key(), TIMES)
    assert path is not None
    entry = json.loads(path.read_text())
    entry["key"]["added later"] = 1
    path.write_text(json.dumps(entry))
    _new_process()
    assert tuned.lookup(_key()) is None


def test_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "file"))
    assert tuned.record(_key(), TIMES) is None
    assert "cannot be written" in caplog.text
    assert tuned.lookup(_key()) == TIMES, "this process still has it"


def test_those_who_keep_plans_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []
    monkeypatch.setattr(tuned, "_listeners", [])
    tuned.when_recorded(lambda: heard.append(tuned.lookup(_key()) == TIMES))
    tuned.record(_key(), TIMES)
    assert heard == [True], "when they hear of it, it is there"


def test_call_sites_are_planned_anew() -> None:
    for sites in (ops._experts_sites, ops._moe_sites):
        sites.add(("of this test",), lambda: None)  # type: ignore[arg-type,return-value]
        assert sites._plans
    tuned.record(_key(), TIMES)
    assert not ops._experts_sites._plans and not ops._moe_sites._plans


_RECORD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from measured_rows import shape_of
from perseus_compile import tuned
from perseus_compile.cuda_cost import PLAIN
torch.cuda.get_device_name = lambda index: "NVIDIA H200"
tuned.driver_version = lambda: "580.1"
for num_tokens in range(1, 40):
    tuned.record(tuned.key_of(shape_of("olmoe", num_tokens), 0), ((PLAIN, float(sys.argv[2])),))
"""


@pytest.mark.slow
def test_processes_that_tune_at_the_same_time_do_not_disturb_each_other() -> None:
    commands = [[sys.executable, "-c", _RECORD, str(Path(__file__).parent), number] for number in "12"]
    running = [subprocess.Popen(command) for command in commands]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    found = [tuned.lookup(_key(num_tokens)) for num_tokens in range(1, 40)]
    assert all(one in (((PLAIN, 1.0),), ((PLAIN, 2.0),)) for one in found)


def test_driver_version_is_read_from_the_kernel_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13.2.0\n"
    )
    monkeypatch.setattr(tuned, "_DRIVER_FILE", file)
    tuned.driver_version.cache_clear()
    assert tuned.driver_version() == "580.159.04"
    tuned.driver_version.cache_clear()
