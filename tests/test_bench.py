"""The benchmarks' own logic, without a GPU: shapes, least work, adapters of the peers, ratios, bars, JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import SPREADS, ModelShape

import gmm

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bars
import bench_grouped_mm
import bench_moe_layer
import bench_multi_tensor_gemm
import deepspeed_table
import peers
import timing
from problem import PASSES, Problem, least_work

SCRIPTS = (bench_grouped_mm, bench_moe_layer, bench_multi_tensor_gemm)
SMALL = ModelShape("small", 6, 40, 16, 24, "unequal")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_help(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, "--help"])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_says_that_it_needs_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__])
    assert script.main() == 2


def test_command_line() -> None:
    options = bench_grouped_mm.parser().parse_args(
        ["--pass", "wgrad,forward", "--methods", "torch,cutlass", "--shape", "4,64,128,256", "--distribution", "zipf"]
    )
    assert options.sections == ["forward", "wgrad"]
    assert options.methods == ["cutlass", "torch"]
    assert options.shape == [(4, 64, 128, 256)]
    for wrong in (["--pass", "backward"], ["--shape", "4,64,128"], ["--distribution", "flat"]):
        with pytest.raises(SystemExit):
            bench_grouped_mm.parser().parse_args(wrong)


@pytest.mark.parametrize("spread", SPREADS)
def test_distributions(spread: str) -> None:
    splits = ModelShape("", 128, 512, 1536, 2048, spread).splits()
    assert len(splits) == 128
    assert all(rows >= 0 and rows % 8 == 0 for rows in splits)
    if spread != "all-or-none":
        assert 0.9 * 128 * 512 < sum(splits) <= 1.05 * 128 * 512
    assert splits == ModelShape("", 128, 512, 1536, 2048, spread).splits()
    empty = splits.count(0)
    assert {"one-hot": empty == 127, "empty30": empty == 38, "equal": empty == 0}.get(spread, True)
    if spread == "zipf":
        first, second = sorted(splits)[:-3:-1]
        assert first / second == pytest.approx(2**1.2, rel=0.01)


def test_every_pass_has_the_shapes_that_its_bars_need() -> None:
    for bar in bars.BARS:
        for which in bar.passes:
            if which in PASSES:
                assert any(bar.regime(shape._asdict()) for shape in bench_grouped_mm.shapes_of(which)), bar
    for which in PASSES:
        shapes = bench_grouped_mm.shapes_of(which)
        assert len(set(shapes)) == len(shapes)
        listed = {(*bars.size(s._asdict()), s.spread) for s in shapes}
        assert which != "forward" or listed >= set(bars.DEEPSPEED_AND_TORCH)


def test_least_work() -> None:
    splits = [8] * 71 + [0] * 57
    assert least_work(splits, 1536, 2048, "forward").flops == 2 * 568 * 1536 * 2048
    weights, tokens = 2 * 1536 * 2048, 2 * 568 * (1536 + 2048)
    moved = {which: least_work(splits, 1536, 2048, which).moved - tokens for which in PASSES}
    assert moved["forward"] == moved["dgrad"] == 71 * weights
    assert moved["wgrad"] == 128 * weights  # the zeros of empty experts, too
    assert moved["wgrad-fp32"] == 128 * 2 * weights
    assert moved["wgrad-accumulate"] == 71 * 4 * weights


def test_floor_is_the_larger_bound() -> None:
    ceilings = timing.Ceilings(dense=800e12, copy=4e12)
    assert ceilings.floor_us(800e12, 1e12) == pytest.approx(1e6)
    assert ceilings.floor_us(80e12, 4e12) == pytest.approx(1e6)


def test_interleaved_takes_medians_of_rounds() -> None:
    values = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 5.0, 6.0])}
    calls = {name: (lambda name=name: name) for name in values}
    assert timing.interleaved(calls, lambda call: next(values[str(call())]), rounds=3) == {"a": 2.0, "b": 5.0}


def fake_deep_gemm() -> ModuleType:
    """Computes what DeepGEMM promises, and insists on what it demands."""
    module = ModuleType("deep_gemm")

    def m_grouped(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, group: torch.Tensor) -> None:
        assert len(a) % 128 == 0 and group.dtype is torch.int32 and len(group) == len(a) == len(d)
        for start in range(0, len(a), 128):
            block = group[start : start + 128]
            assert block[0] >= 0 and set(block.tolist()) <= {int(block[0]), -1}
        d.copy_(torch.stack([x @ b[max(g, 0)].t() for x, g in zip(a, group.tolist(), strict=True)]))

    def k_grouped(
        a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, ks: list[int], on_device: torch.Tensor, c: Any
    ) -> None:
        assert d.dtype is torch.float32 and all(k % 128 == 0 for k in ks) and on_device.tolist() == ks
        for i, (x, y) in enumerate(zip(a.split(ks), b.split(ks), strict=True)):
            d[i] = x.float().t() @ y.float() + (0 if c is None else c[i])

    module.m_grouped_bf16_gemm_nt_contiguous = m_grouped  # type: ignore[attr-defined]
    module.k_grouped_bf16_gemm_tn_contiguous = k_grouped  # type: ignore[attr-defined]
    return module


def fake_quack() -> dict[str, ModuleType]:
    """Its modules."""
    interface, config = ModuleType("quack.gemm_interface"), ModuleType("quack.gemm_config")

    class Tuned:
        @staticmethod
        def fn(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, config: Any, cu_seqlens_m: Any = None,
            cu_seqlens_k: Any = None, add_to_output: bool = False,
        ) -> None:  # fmt: skip
            ends = (cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k).tolist()
            for i, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
                if cu_seqlens_k is None:
                    out[start:end] = a[start:end] @ b[i]
                else:
                    product = a[:, start:end].float() @ b[start:end].float()
                    out[i] = product + out[i] if add_to_output else product

    interface.gemm_tuned = Tuned  # type: ignore[attr-defined]
    config.GemmConfig = lambda **fields: fields  # type: ignore[attr-defined]
    return {"quack": ModuleType("quack"), interface.__name__: interface, config.__name__: config}


@pytest.mark.parametrize("spread", ("unequal", "empty30"))
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("peer", ("torch", "loop", "deep_gemm", "quack"))
def test_peers_compute_the_problem(peer: str, which: str, spread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm())
    for name, module in fake_quack().items():
        monkeypatch.setitem(sys.modules, name, module)
    problem = Problem(SMALL._replace(spread=spread), which, "cpu")
    reference = problem.reference()
    variants = peers.PEERS[peer](problem)
    assert len(variants) == {"quack": 6, "deep_gemm": int(which != "wgrad")}.get(peer, 1)
    for method in variants.values():
        problem.reset()
        assert problem.error(method.result(method.run()), reference) < bench_grouped_mm.TOLERANCE


@pytest.mark.parametrize("half", (False, True), ids=("bf16", "fp16"))
@pytest.mark.parametrize("which", PASSES)
def test_ours_computes_the_problem(which: str, half: bool) -> None:
    problem = Problem(SMALL, which, "cpu")
    reference = problem.reference()
    run = bench_grouped_mm.ours("reference", problem.half() if half else problem)[""].run
    problem.reset()
    result = run()
    fp32 = result.dtype is torch.float32
    assert fp32 == (which in ("wgrad-fp32", "wgrad-accumulate"))
    assert problem.error(result, reference) < (bench_grouped_mm.TOLERANCE_FP32 if fp32 else bench_grouped_mm.TOLERANCE)


def test_error_is_of_the_worst_group() -> None:
    problem = Problem(SMALL, "forward", "cpu")
    reference = problem.reference()
    result = torch.cat(reference)
    assert problem.error(result, reference) == 0
    small = min(rows for rows in problem.splits if rows)
    group = problem.splits.index(small)
    problem.groups(result)[group][0] *= 2
    assert problem.error(result, reference) > 0.5 / small**0.5
    result[-1, -1] = float("nan")
    assert problem.error(result, reference) == float("inf")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems of the script lie on the CPU, and one of its methods of gmm is the loop."""
    monkeypatch.setattr(bench_grouped_mm, "Problem", lambda shape, which: Problem(shape, which, "cpu"))
    monkeypatch.setattr(bench_grouped_mm, "ours", lambda method, problem: peers.mm_loop(problem))
    monkeypatch.setattr(bench_grouped_mm, "burst_ms", lambda call: 1.0 + 0 * len(str(call())))
    monkeypatch.setattr(gmm, "last_backend", lambda: "cutlass: sm90")


def wrong(problem: Problem) -> peers.Variants:
    """A peer that forgets one group."""
    right = peers.mm_loop(problem)[""].run

    def run() -> torch.Tensor:
        result = right()
        problem.groups(result)[2].zero_()
        return result

    return {"": peers.Method(run)}


def row_of(methods: list[str], which: str = "forward") -> timing.Row:
    return bench_grouped_mm.time_problem(SMALL, which, methods, 0.0, timing.Ceilings(800e12, 4e12))


@pytest.mark.usefixtures("on_cpu")
def test_wrong_peer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "graph", wrong)
    row = row_of(["cutlass", "loop", "graph", "dense"])
    assert set(row["us"]) == {"cutlass", "loop", "dense"}
    assert row["peers"] == ["loop"]
    assert "relative error" in row["dropped"]["graph"]


@pytest.mark.usefixtures("on_cpu")
def test_wrong_result_of_ours_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_grouped_mm, "ours", lambda method, problem: wrong(problem))
    with pytest.raises(RuntimeError, match=r"6 x 40 x 16 x 24 unequal, forward, cutlass: relative error"):
        row_of(["cutlass", "loop"])


@pytest.mark.usefixtures("on_cpu")
def test_fp32_out_through_bf16_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="at most 0.001"):  # the loop rounds its products
        row_of(["cutlass"], "wgrad-accumulate")


@pytest.mark.usefixtures("on_cpu")
def test_another_backend_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="asked for triton, but cutlass: sm90 ran"):
        row_of(["triton"])


def row(which: str, sizes: tuple[int, int, int, int], spread: str, us: dict[str, float], **more: Any) -> timing.Row:
    flops = 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
    named = dict(zip(("groups", "tokens", "n", "k"), sizes, strict=True))
    tflops = {method: round(flops / value / 1e6, 1) for method, value in us.items()}
    found = [method for method in us if method in peers.PEERS]
    base = {"shape": "", **named, "spread": spread, "pass": which, "floor_us": 90.0, "us": us, "tflops": tflops}
    return {**base, "peers": found, "dropped": {}, **more}


LARGE = (8, 4096, 768, 2048)


def test_ratios() -> None:
    us = {
        "cutlass": 100.0,
        "triton": 200.0,
        "fp16": 104.0,
        "list": 125.0,
        "dense": 99.0,
        "torch": 120.0,
        "quack": 105.0,
    }
    rows = [
        row("forward", LARGE, "equal", us),
        row("wgrad", LARGE, "equal", {"cutlass": 100.0}),
        row("wgrad", LARGE, "zipf", {"cutlass": 160.0, "torch": 200.0}),
        row("wgrad-fp32", LARGE, "equal", {"cutlass": 110.0}),
        row("wgrad-accumulate", LARGE, "equal", {"cutlass": 220.0}),
        row("forward", LARGE, "zipf", {"triton": 80.0, "torch": 40.0}),
    ]
    bars.add_ratios(rows)
    assert rows[0]["best_peer"] == "quack"
    assert rows[0]["ratios"] == {
        "floor": 0.9,
        "best peer": 1.05,
        "torch": 1.2,
        "dense": 0.99,
        "fp16/bf16": 0.962,
        "list/ragged": 0.8,
        "triton/DeepSpeed's": 1.0,
    }
    assert rows[2]["ratios"]["balanced"] == pytest.approx(100 / 160, abs=2e-3)
    assert rows[3]["ratios"]["accumulate"] == pytest.approx(2.0, abs=5e-3)
    assert "accumulate" not in rows[4]["ratios"]
    assert rows[5]["ratios"]["best peer"] == 0.5


def test_bars() -> None:
    good = {
        "cutlass": 100.0,
        "triton": 120.0,
        "dense": 100.0,
        "torch": 200.0,
        "cublas": 120.0,
        "fp16": 100.0,
        "list": 100.0,
    }
    rows = [row("forward", LARGE, "equal", good)]
    bars.add_ratios(rows)
    host = [{"call": "torch._grouped_mm", "us": 20.0}, {"call": "torch.ops, cutlass", "us": 11.0}]
    first = [{"backend": "cutlass", "seconds": 1.0}]
    assert list(bars.missed_bars(rows, host, first)) == []

    rows = [row("forward", LARGE, "equal", {**good, "torch": 101.0, "dense": 98.0, "cublas": 110.0, "triton": 150.0})]
    bars.add_ratios(rows)
    host[1]["us"] = 21.0
    first[0]["seconds"] = 2.5
    missed = list(bars.missed_bars(rows, host, first))
    for part in (
        "8 x 4096 x 768 x 2048 equal, forward: best peer is 1.010, at least 1.02 wanted",
        "dense is 0.980",
        "cublas is 1.100",
        "triton/DeepSpeed's is 1.122",
        "geometric mean of best peer is 1.010",
        "torch.ops, cutlass: 21.0 us, at most 12.0",
        "torch.ops, cutlass: 21.0 us, at most torch._grouped_mm's 20.0",
        "first call, cutlass: 2.5 s",
    ):
        assert sum(part in line for line in missed) == 1, part
    assert len(missed) == 8


def test_results_survive_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("forward", LARGE, "equal", {"cutlass": 100.0, "triton": 130.0, "torch": 120.0, "dense": 99.0}),
        row("wgrad", LARGE, "zipf", {"triton": 90.0}, dropped={"quack": "relative error 0.5"}),
    ]
    bars.add_ratios(rows)
    deepspeed = {**SMALL._asdict(), "pass": "deepspeed forward", "us": {"triton": 20.0, "loop": 90.0}}
    facts = {"gpu": "H200", "torch": "2.11", "date": "2026-12-01", "dense_tflops": 790.0, "copy_tb_s": 4.2}
    host, first = [{"call": "torch._grouped_mm", "us": 20.0}], [{"backend": "triton", "seconds": 3.0}]
    results = {**facts, "rows": rows, "deepspeed": [deepspeed], "host": host, "first_calls": first}
    timing.save(results, tmp_path / "new" / "results.json")
    loaded = json.loads((tmp_path / "new" / "results.json").read_text())
    assert loaded == results
    bench_grouped_mm.print_results(loaded)
    out = capsys.readouterr().out
    for part in ("8 x 4096 x 768 x 2048 zipf", "left out: ", "1.20", "first call of a process, triton: 3.00 s"):
        assert part in out
    pytest.importorskip("matplotlib")
    bench_grouped_mm.plot(loaded, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setitem(sys.modules, "quack", None)
    peers.version.cache_clear()
    usable, versions = bench_grouped_mm.importable(["cutlass", "triton", "torch", "quack"])
    peers.version.cache_clear()
    assert usable == ["triton", "torch"]
    assert versions["torch"] == torch.__version__
    assert "not importable" in versions["quack"]


def test_moe_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = bench_moe_layer.Model(experts=6, top_k=2, hidden=64, intermediate=32, tokens=50)
    x, weights, dy = bench_moe_layer.make_operands(model, "cpu")
    monkeypatch.setattr(bench_moe_layer, "METHODS", {"torch": bench_moe_layer.torch_grouped_mm})
    bench_moe_layer.check(model, x, weights, dy)

    def shifted(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return bench_moe_layer.torch_grouped_mm(x, w.roll(1, 0), offs)

    monkeypatch.setattr(bench_moe_layer, "METHODS", {"torch": shifted})
    with pytest.raises(RuntimeError, match="torch, output: relative error"):
        bench_moe_layer.check(model, x, weights, dy)


def test_moe_layer_is_the_sum_over_experts() -> None:
    torch.manual_seed(0)
    model = bench_moe_layer.Model(experts=4, top_k=2, hidden=16, intermediate=8, tokens=10)
    x, weights, _ = bench_moe_layer.make_operands(model, "cpu")
    x, weights = x.detach().float(), bench_moe_layer.Weights(*(w.detach().float() for w in weights))
    experts = bench_moe_layer.choose(x, weights.router, model.top_k)
    got = bench_moe_layer.moe_layer(x, weights, experts, bench_moe_layer.loop_grouped_mm)
    scores = (x @ weights.router.t()).softmax(-1)
    for token in range(model.tokens):
        chosen = experts[token].tolist()
        total = sum(scores[token, e] for e in chosen)
        wanted = torch.zeros(model.hidden)
        for e in chosen:
            gate, up = (weights.gate_up[e] @ x[token]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            wanted += scores[token, e] / total * (weights.down[e] @ hidden)
        torch.testing.assert_close(got[token], wanted)


def test_deepspeed_table_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_table, "burst_ms", lambda call: 1.0 + 0 * len(str(call())))
    rows = deepspeed_table.time_shape(SMALL, [], 0.0, "cpu")
    assert [r["pass"] for r in rows] == ["deepspeed forward", "deepspeed forward+backward"]
    assert set(rows[0]["us"]) == {"torch", "loop"}
    monkeypatch.setattr(deepspeed_table, "loop_layer", lambda splits: lambda x, w, offs: x @ w[0].t())
    with pytest.raises(RuntimeError, match="small, torch: relative error"):
        deepspeed_table.time_shape(SMALL, [], 0.0, "cpu")
