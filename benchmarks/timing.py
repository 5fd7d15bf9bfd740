"""What the benchmarks share: timing in interleaved rounds, host time, the machine's ceilings, tables."""

from __future__ import annotations

import functools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gmm
from gmm.cli.info import driver

Row = dict[str, Any]
Call = Callable[[], object]

FLUSH_BYTES = 256 * 2**20  # five times the L2 cache of an H200
FLUSH_SECONDS = 50e-6  # at least, of reading them


def do_bench_ms(call: Call) -> float:
    """Milliseconds of a call: the median of triton.testing.do_bench, which flushes the L2 cache before each."""
    import triton.testing

    return triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median")


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES // 4, device="cuda")


def burst_ms(call: Call, calls: int = 3) -> float:
    """Milliseconds of a call: the median of a few, each after a flush of the L2 cache that also hides the launch.

    What do_bench measures, without its warm-up, for rounds so short that many fit into a second; and the flush reads.
    Writing, as do_bench's does, would leave the cache full of lines that the call has to write back first: 5 us of 40
    where 32 groups of 64 rows meet 768 x 2048 (H200), memory traffic that is not the call's. A call that takes the host
    longer than a flush the GPU (lists of 128 groups: 0.2 ms) gets several."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    host = 0.0
    for begin, end in events:
        for _ in range(1 + min(int(host / FLUSH_SECONDS), 9)):
            _flush_buffer().sum()
        begin.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def interleaved(
    calls: dict[str, Call], measure: Callable[[Call], float], *, rounds: int, seconds: float = 0.0
) -> dict[str, float]:
    """Median over rounds of what `measure` says of each call: `rounds` of them, and more until `seconds` are over.

    Within a round the calls take turns in random order, since order alone shifts results (power)."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for name in random.sample(list(calls), len(calls)):
            times[name].append(measure(calls[name]))
        done += 1
    return {name: statistics.median(values) for name, values in times.items()}


def host_us(call: Call, batches: int, calls: int = 20) -> float:
    """Microseconds of host time a call. The queue is drained between batches, so no call waits for a place in it."""
    for _ in range(3 * calls):
        call()
    means = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(means)


class Ceilings(NamedTuple):
    """What this GPU does at best, measured in the same run."""

    dense: float  # FLOP/s of torch.mm, bf16, 8192 x 8192 x 8192
    copy: float  # bytes/s of a device copy, read and written

    def floor_us(self, flops: float, moved: float) -> float:
        """The least time for a call of so many FLOPs that must move so many bytes."""
        return 1e6 * max(flops / self.dense, moved / self.copy)


def measure_ceilings(seconds: float) -> Ceilings:
    """Of the current device; random data, since the clock depends on them."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"dense": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}
    ms = interleaved(calls, burst_ms, rounds=10, seconds=seconds)
    return Ceilings(2e3 * 8192**3 / ms["dense"], 2e3 * source.nbytes / ms["copy"])


def machine() -> dict[str, str]:
    """What the figures depend on."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "gmm": gmm.__version__,
    }


def progress(done: int, total: int, text: str) -> None:
    """One line on stderr, rewritten; an empty one when all is done."""
    line = f"\r{done + 1}/{total} {text}".ljust(80) if done < total else "\r".ljust(81) + "\r"
    print(line, end="", file=sys.stderr, flush=True)


def print_table(title: str, header: list[str], rows: list[list[str]], width: int = 140) -> None:
    """Through rich where it is installed, else in plain columns. The first column is text, the others are numbers."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(f"\n{title}")
        for row in [header, *rows]:
            print("  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]))
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=console.width if console.is_terminal else width).print(table)


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the JSON, and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {path}")
