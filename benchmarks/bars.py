"""The project's speed bars for grouped_mm on an H200, in one table each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from timing import Row


class Bar(NamedTuple):
    """Every row of these passes and this regime that has the ratio must reach it."""

    passes: tuple[str, ...]
    regime: Callable[[Row], bool]
    ratio: str  # of row["ratios"]
    at_least: float


def anywhere(_: Row) -> bool:
    """Every shape."""
    return True


def few_rows(row: Row) -> bool:
    """Bound by reading the weights."""
    return row["tokens"] <= 128


def balanced(row: Row) -> bool:
    """Large groups of one size."""
    return row["tokens"] >= 512 and row["spread"] == "equal"


def unbalanced(row: Row) -> bool:
    """Large groups of 0.2 to 1.8 times the average."""
    return row["tokens"] >= 512 and row["spread"] == "unequal"


def large_experts(row: Row) -> bool:
    """So many tokens for each weight that its traffic does not count."""
    return row["tokens"] >= 4096 and row["spread"] in ("equal", "unequal")


def fine_grained(row: Row) -> bool:
    """So few tokens for each weight that the traffic of an fp32 gradient counts most."""
    return 128 < row["tokens"] <= 512 and row["groups"] >= 32 and row["spread"] in ("equal", "unequal")


def skewed(row: Row) -> bool:
    """A few experts have most of the tokens."""
    return row["spread"] in ("skewed", "zipf", "one-hot")


INPUT_DTYPE = ("forward", "dgrad", "wgrad")

# Ratios of rates: over 1 is faster. "cutlass" where only one name stands.
BARS = (
    Bar(INPUT_DTYPE, anywhere, "best peer", 1.02),
    Bar(("forward",), balanced, "dense", 1.00),
    Bar(("forward",), unbalanced, "dense", 0.97),
    Bar(("forward", "dgrad"), few_rows, "floor", 0.90),
    Bar(("forward", "dgrad"), few_rows, "best peer", 1.20),
    Bar(("forward",), lambda r: (r["groups"], r["tokens"]) == (8, 4096) and balanced(r), "cublas", 1.15),
    Bar(("forward",), lambda r: (r["groups"], r["tokens"]) == (16, 2048) and balanced(r), "cublas", 1.35),
    Bar((*INPUT_DTYPE, "wgrad-accumulate"), anywhere, "fp16/bf16", 0.97),
    Bar(("forward", "dgrad", "wgrad-accumulate"), anywhere, "list/ragged", 0.97),
    Bar(("wgrad",), skewed, "torch", 1.20),
    Bar(("wgrad",), skewed, "balanced", 1 / 1.25),
    Bar(("wgrad-accumulate",), large_experts, "best peer", 1.00),
    Bar(("wgrad-accumulate",), fine_grained, "best peer", 1.40),
    Bar(("wgrad-accumulate",), fine_grained, "floor", 0.90),
    Bar(("wgrad-fp32",), fine_grained, "accumulate", 1.35),
    Bar(("forward",), anywhere, "triton/DeepSpeed's", 1.25),
    Bar(("deepspeed forward", "deepspeed forward+backward"), anywhere, "triton/loop", 3.0),
)
GEOMETRIC_MEAN = dict.fromkeys(INPUT_DTYPE, 1.12)  # over the best peer, of all rows of a pass

MAX_HOST_US = {"torch.ops, cutlass": 12.0, "gmm.grouped_mm, triton": 25.0}
NOT_ABOVE_TORCH = ("torch.ops, cutlass", "gmm.grouped_mm, cutlass")  # in host time, of the same run
MAX_FIRST_CALL_S = {"cutlass": 2.0, "triton": 10.0}

# Rates of DeepSpeed's Triton kernel and of torch._grouped_mm, TFLOP/s of one run on an H200 (2026-11-30). Its kernel is
# not published as a package, so its ratio to torch stands for it.
DEEPSPEED_AND_TORCH = {
    (8, 4096, 768, 2048, "equal"): (384, 640),
    (16, 2048, 768, 2048, "unequal"): (362, 572),
    (128, 512, 1536, 2048, "unequal"): (302, 545),
    (128, 512, 2048, 768, "unequal"): (261, 466),
    (8, 4096, 4096, 7168, "unequal"): (405, 675),
    (32, 1024, 4096, 7168, "unequal"): (376, 627),
    (32, 512, 5760, 2880, "unequal"): (323, 531),
    (32, 64, 768, 2048, "unequal"): (58, 129),
    (128, 8, 1536, 2048, "all-or-none"): (19, 24),
}


def size(row: Row) -> tuple[int, int, int, int]:
    """Experts, average tokens, N, K."""
    return row["groups"], row["tokens"], row["n"], row["k"]


def describe(row: Row) -> str:
    """A row in one line."""
    return f"{' x '.join(map(str, size(row)))} {row['spread']}, {row['pass']}"


def add_ratios(rows: list[Row]) -> None:
    """Sets row["ratios"] of the rows of grouped_mm, from their times and from other rows of the run."""
    rate = {(row["pass"], *size(row), row["spread"]): row["tflops"].get("cutlass") for row in rows}
    for row in rows:
        us, ratios, compare_with = row["us"], {}, {}
        peers = {name: us[name] for name in row["peers"] if name in us}
        ours = "cutlass" if "cutlass" in us else "triton"
        if ours not in us:
            row["ratios"] = ratios
            continue
        ratios["floor"] = row["floor_us"] / us[ours]
        if peers:
            row["best_peer"] = min(peers, key=lambda name: peers[name])
            ratios["best peer"] = peers[row["best_peer"]] / us[ours]
        for name in ("torch", "dense", "cublas"):
            if name in us:
                ratios[name] = us[name] / us[ours]
        for name, other in (("fp16/bf16", "fp16"), ("list/ragged", "list")):
            if other in us:
                ratios[name] = us[ours] / us[other]
        theirs = DEEPSPEED_AND_TORCH.get((*size(row), row["spread"]))
        if theirs and "triton" in us and "torch" in us:
            ratios["triton/DeepSpeed's"] = us["torch"] / us["triton"] / (theirs[0] / theirs[1])
        if ours == "cutlass":
            if row["spread"] != "equal":
                compare_with["balanced"] = (row["pass"], *size(row), "equal")
            if row["pass"] == "wgrad-fp32":
                compare_with["accumulate"] = ("wgrad-accumulate", *size(row), row["spread"])
        for name, key in compare_with.items():
            if rate.get(key):
                ratios[name] = row["tflops"]["cutlass"] / rate[key]
        row["ratios"] = {name: round(value, 3) for name, value in ratios.items()}


def geometric_mean(rows: list[Row], which: str) -> float | None:
    """Of the ratio of CUTLASS to the best peer."""
    with_cutlass = [row["ratios"] for row in rows if row["pass"] == which and "cutlass" in row["us"]]
    ratios = [ratios["best peer"] for ratios in with_cutlass if "best peer" in ratios]
    return statistics.geometric_mean(ratios) if ratios else None


def missed_bars(rows: list[Row], host: list[Row], first_calls: list[Row]) -> Iterator[str]:
    """A line for every bar that the measurement misses."""
    for row in rows:
        for bar in BARS:
            held = row["pass"] in bar.passes and bar.regime(row) and bar.ratio in row["ratios"]
            # Without CUTLASS the other ratios are those of the Triton backend, which has bars of its own.
            if not held or not ("cutlass" in row["us"] or bar.ratio.startswith("triton")):
                continue
            value = row["ratios"][bar.ratio]
            if value < bar.at_least:
                yield f"{describe(row)}: {bar.ratio} is {value:.3f}, at least {bar.at_least:.2f} wanted"
    for which, bound in GEOMETRIC_MEAN.items():
        mean = geometric_mean(rows, which)
        if mean is not None and mean < bound:
            yield f"{which}: geometric mean of best peer is {mean:.3f}, at least {bound} wanted"
    us = {row["call"]: row["us"] for row in host}
    for call, value in us.items():
        if value > MAX_HOST_US.get(call, value):
            yield f"host time of {call}: {value} us, at most {MAX_HOST_US[call]} wanted"
        if call in NOT_ABOVE_TORCH and value > us["torch._grouped_mm"]:
            yield f"host time of {call}: {value} us, at most torch._grouped_mm's {us['torch._grouped_mm']} wanted"
    for row in first_calls:
        if row["seconds"] > MAX_FIRST_CALL_S[row["backend"]]:
            yield f"first call, {row['backend']}: {row['seconds']} s, at most {MAX_FIRST_CALL_S[row['backend']]} wanted"
