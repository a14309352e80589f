"""Is every PERSEUS_* variable in the one table, in the docs, and read nowhere else?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perseus_compile import env
from perseus_compile.jit.cache import default_folder

ROOT = Path(__file__).parents[2]


def test_docs_list_exactly_these() -> None:
    rows = re.findall(
        r"^\| `(PERSEUS_\w+)` \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE
    )
    assert rows == [(variable.name, variable.meaning, variable.default) for variable in env.VARIABLES]


def test_no_other_file_reads_one() -> None:
    folders = (ROOT / "perseus_compile", ROOT / "passes")
    readers = {
        path.name
        for folder in folders
        for path in folder.rglob("*.py")
        if re.search(r"(environ|getenv)[^\n]*PERSEUS_", path.read_text())
    }
    assert readers == set()
    assert len({variable.name for variable in env.VARIABLES}) == len(env.VARIABLES)


def test_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"
    monkeypatch.setenv(env.CACHE_DIR.name, "")  # empty is unset
    assert default_folder() == tmp_path / "xdg" / "perseus_compile" / "kernels"
