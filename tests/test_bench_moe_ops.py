"""benchmarks/bench_moe_ops.py without a GPU: its layers agree, and the bytes that it counts are the operands'."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_moe_ops
from bench_moe_layer import Model

import gmm

MODEL = Model(experts=6, top_k=2, hidden=64, intermediate=32, tokens=50)


def test_layers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    operands = bench_moe_ops.make_operands(MODEL, "cpu")
    bench_moe_ops.check(operands)
    right = gmm.moe.feed_forward
    monkeypatch.setattr(gmm.moe, "feed_forward", lambda *operands: 1.1 * right(*operands))
    with pytest.raises(RuntimeError, match="gmm, output: relative error"):
        bench_moe_ops.check(operands)


def test_hugging_face() -> None:
    pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    steps = bench_moe_ops.hugging_face(MODEL, "cpu")
    bench_moe_ops.check_close("gmm", steps["gmm"](), steps["eager"]())


def test_bytes() -> None:
    ops = bench_moe_ops.ops(bench_moe_ops.make_operands(MODEL, "cpu"))
    for call, _ in ops.values():
        call()
    assert ops["permute"][1] == 2 * 64 * (50 + 100) and ops["activation"][1] == 2 * 100 * 3 * 32


def test_swiglu() -> None:
    """One kernel gives what two do."""
    torch.manual_seed(0)
    calls = bench_moe_ops.swiglu(bench_moe_ops.make_operands(MODEL, "cpu"))
    torch.testing.assert_close(calls["one kernel"]()[1], calls["two kernels"]())
    ours, theirs = calls["backward, one kernel"](), calls["backward, two kernels"]()
    torch.testing.assert_close((ours[0], ours[1]), (theirs[0], theirs[2]))
    assert calls["product"]().shape == (100, 64) and calls["backward, product"]().shape == (100, 32)


def test_help_and_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_moe_ops.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        bench_moe_ops.main()
    assert stop.value.code == 0 and "--out" in capsys.readouterr().out
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["bench_moe_ops.py"])
        assert bench_moe_ops.main() == 2
