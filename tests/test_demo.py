"""python -m gmm.demo: trains, checks every result, and says so with its exit status."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import environment

import gmm
import gmm.demo


def test_demo() -> None:
    command = [sys.executable, "-m", "gmm.demo"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert gmm.__version__ in done.stdout
    assert ("cutlass" if torch.cuda.is_available() else "reference") in done.stdout


def test_demo_fails_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gmm.multi_tensor_gemm

    def wrong(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        first, *others = right(*args, **kwargs)
        return [first * 1.02, *others]

    monkeypatch.setattr(gmm, "multi_tensor_gemm", wrong)
    assert gmm.demo.main() != 0
