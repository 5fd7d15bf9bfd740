"""python -m gmm: what each command prints and returns, without a GPU and on one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import environment

import gmm
from gmm.cli import bench, main, output, selftest


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status and what was printed."""
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_module_runs() -> None:
    command = [sys.executable, "-m", "gmm", "explain", "--sm", "90", "--pass", "forward"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout.startswith("forward, 128 x 512, 1536 x 2048\ncutlass: sm90_descriptor_array_192x128x64")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info")
    assert (
        status == 0
        and re.search(rf"^gmm +{gmm.__version__}$", out, re.MULTILINE)
        and gmm.build_info()["compiler"] in out
    )
    assert f"Backends on {'cuda:0' if torch.cuda.is_available() else 'cpu'}" in out
    works = re.findall(r"^(cutlass|triton|cublas|reference) +(grouped_mm|lists) +(yes|no) +(.+)$", out, re.MULTILINE)
    assert len(works) >= 8 and ("reference", "lists", "yes", "reference: torch.mm") in works
    assert ("triton", "lists", "no", "it takes the tensors of grouped_mm, not lists") in works


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_info_finds_what_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = gmm.grouped_mm

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        if fault == "raises" and options["backend"] == "reference":
            raise RuntimeError("CUDA error: no kernel image\nmore of it")
        return right(*args, **options) + 1

    monkeypatch.setattr(gmm, "grouped_mm", broken)
    status, out, _ = run(capsys, "info")
    reason = "reference: torch.mm: wrong values" if fault == "wrong" else "CUDA error: no kernel image"
    assert status == 1 and re.search(f"reference +grouped_mm +FAILS +{reason}$", out, re.MULTILINE)


EXPLAINED = {
    "forward": ["cutlass: sm90_descriptor_array_192x128x64_pingpong_1x2"] * 2,
    "dgrad": ["cutlass: sm90_descriptor_array_192x128x64_pingpong_1x2"] * 2,
    "wgrad": ["cutlass: sm90_descriptor_array_128x192x64_pingpong_2x1"] * 2,
}


@pytest.mark.parametrize("name", EXPLAINED)
@pytest.mark.parametrize("lists", [False, True])
def test_explain(capsys: pytest.CaptureFixture[str], name: str, lists: bool) -> None:
    flags = ["--list"] if lists else []
    status, out, _ = run(
        capsys, "explain", "--shape", "8,512,256,128", "--pass", name, "--sm", "90", "--dtype", "fp16", *flags
    )
    assert status == 0 and out.startswith(f"{name}, 8 x 512, 256 x 128\n{EXPLAINED[name][lists]}")


def test_explain_all_passes_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", "--shape", "4,8,64,64", "--shape", "2,8,64,64", "--sm", "89")
    assert status == 0 and out.count("\ntriton: ") == 6 and "which only sm90 runs; the device is sm89" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "arguments are required: COMMAND"),
        (("explain", "--shape", "1,2,3"), "--shape: expected E,rows,N,K, as 128,512,1536,2048, got '1,2,3'"),
        (("explain", "--shape", "1,2,3,x"), "expected E,rows,N,K"),
        (("explain", "--shape", "1,0,3,4"), "expected positive numbers below 2^31, got '1,0,3,4'"),
        (("explain", "--shape", f"1,2,3,{10**20}"), "expected positive numbers below 2^31"),
        (("explain", "--sm", "80", "--backend", "cutlass"), "backend 'cutlass' cannot take this call"),
        (("explain", "--accumulate", "--dtype", "fp32", "--out-dtype", "bf16"), "python -m gmm explain: "),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and message in err and not out.strip() and "Traceback" not in err


def test_selftest(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "selftest")
    assert status == 0, out + err
    if not torch.cuda.is_available():
        assert "96 results, 0 wrong" in out and "cutlass, triton, cublas: not on this machine" in out


def test_selftest_finds_faults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = gmm.grouped_mm

    def wrong(*args: Any, out: torch.Tensor, **options: Any) -> None:
        right(*args, out=out, **options)
        if options["backend"] == "reference" and not options["accumulate"]:
            out.view(-1)[5] = float("nan") if out.dtype is torch.float16 else out.view(-1)[5] + 1

    monkeypatch.setattr(selftest.gmm, "grouped_mm", wrong)
    status, out, _ = run(capsys, "selftest")
    assert status == 1 and ", 36 wrong" in out  # three passes, three dtypes, two rows, two sizes
    assert out.count("WRONG: reference grouped_mm fp16") == 12 and "inf of the bound" in out


def test_bench_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(capsys, "bench") == (2, "", "python -m gmm bench: needs a CUDA GPU; torch sees none here\n")


@pytest.fixture
def bench_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the calls run on the CPU, and nothing is timed."""
    if torch.cuda.is_available():
        return

    def measure(call: Any) -> float:
        call()
        return 0.5

    time_pass = bench.time_pass
    monkeypatch.setattr(bench, "time_pass", lambda layer, name, _: time_pass(layer, name, torch.device("cpu")))
    monkeypatch.setattr(bench, "measure_ms", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")


@pytest.mark.usefixtures("bench_anywhere")
def test_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    json_file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    status, out, err = run(
        capsys, "bench", "--shape", "4,16,64,32", "--shape", "2,8,32,16", "--json", str(json_file), "--plot", str(plot)
    )
    assert status == 0, err
    rows = json.loads(json_file.read_text())["rows"]
    assert [(row["layer"]["experts"], row["pass"]) for row in rows] == [
        (e, name) for e in (4, 2) for name in ("forward", "dgrad", "wgrad")
    ]
    assert all({"gmm", "loop"} <= set(row["ms"]) and row["kernel"] for row in rows)
    assert rows[0]["flops"] == 2 * 4 * 16 * 64 * 32 and "2 x 8, 32 x 16" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("bench_anywhere")
def test_bench_computes_the_passes() -> None:
    layer = bench.Layer(3, 8, 32, 16)
    for name in ("forward", "dgrad", "wgrad"):
        calls = bench.methods(layer, name, torch.device("cuda" if torch.version.cuda and on_gpu() else "cpu"))
        ours, loop = calls["gmm"](), calls["loop"]()
        assert isinstance(ours, torch.Tensor) and isinstance(loop, list)
        right = torch.stack(loop) if name == "wgrad" else torch.cat(loop)
        torch.testing.assert_close(ours, right, rtol=2**-7, atol=2**-7)


def on_gpu() -> bool:
    return torch.cuda.device_count() > 0


def test_missing_folder_and_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bench_anywhere: None, tmp_path: Path
) -> None:
    shape = ("bench", "--shape", "1,8,16,16")
    status, _, err = run(capsys, *shape, "--json", str(tmp_path / "no" / "x.json"))
    assert status == 2 and "No such file" in err and "Traceback" not in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, *shape, "--plot", str(tmp_path / "x.png"))
    assert (status, err) == (2, "python -m gmm bench: --plot needs matplotlib: pip install matplotlib\n")


@pytest.mark.parametrize("rich", [True, False])
def test_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        for name in ("rich", "rich.console", "rich.table", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert list(output.track([1, 2], "working")) == [1, 2]
    output.print_table("title", ("name", "value"), [("a", "1.5"), ("bc", "20")])
    out, err = capsys.readouterr()
    assert "title" in out and "bc" in out and ("working" in err or rich)
    assert rich == ("│" in out)
    if not rich:
        assert out == "\ntitle\nname  value\na       1.5\nbc       20\n"


@pytest.mark.gpu
def test_selftest_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "selftest")
    assert status == 0, out
    kernels = ["cublas: ", "triton: "]
    if torch.cuda.get_device_capability() == (9, 0):
        kernels += [f"cutlass: sm90_descriptor_array_{tile}" for tile in ("192x128", "128x64", "128x192")]
    assert all(kernel in out for kernel in kernels), out


@pytest.mark.gpu
def test_bench_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "bench", "--shape", "4,128,256,128")
    assert status == 0 and out.count("4 x 128, 256 x 128") == 3
