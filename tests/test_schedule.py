"""The kernel's own schedule, device code that a CPU runs here: each element of D is in exactly one tile."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_each_element_is_in_one_tile(tmp_path: Path) -> None:
    """Random groups in both forms, and clusters that ask in random order, some of them for tiles from the back."""
    program = tmp_path / "schedule"
    folders = (f"-I{ROOT / folder}" for folder in ("tests/c/lanes", "csrc", "csrc/include"))
    command = ["g++", "-std=c++17", "-O1", *folders, str(ROOT / "tests" / "c" / "schedule.cpp"), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
