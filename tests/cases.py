"""The shapes of the tests and the benchmark: groups, layouts and the edge lists.

A group is (M, N, K): D [M, N] = op(A) [M, K] @ op(B) [K, N].
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class Group(NamedTuple):
    """One product's sizes."""

    m: int
    n: int
    k: int


class Layout(NamedTuple):
    """How a and b are stored: [M, K] or transposed [K, M], and [K, N] or transposed [N, K]."""

    trans_a: bool
    trans_b: bool


FORWARD = Layout(False, True)  # x [M, K] @ w [N, K]^T
DGRAD = Layout(False, False)  # dy [M, K] @ w [K, N]
WGRAD = Layout(True, False)  # dy [K, M]^T @ x [K, N]: the tokens are K
LAYOUTS = {"nt": FORWARD, "nn": DGRAD, "tn": WGRAD, "tt": Layout(True, True)}

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


# The CUTLASS kernels' names, out of the tables that the plan chooses from; apart those with an epilogue.
HEADERS = (Path(__file__).parents[1] / "csrc" / "cutlass" / "sm90").glob("*/heuristics.h")
NAMES = sorted(name for header in HEADERS for name in re.findall(r'"(sm90_\w+)"', header.read_text()))
KERNELS = [name for name in NAMES if "swiglu" not in name]
SWIGLU, SWIGLU_BACKWARD = (name for name in NAMES if "swiglu" in name)


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, float16 or float32, for test ids and messages."""
    return str(dtype).removeprefix("torch.")


def ragged(rows: list[int], outer: int, inner: int, layout: Layout) -> list[Group]:
    """Groups of an MoE layer with `rows` tokens each. The tokens are M, or K when a is stored transposed (wgrad)."""
    if layout.trans_a:
        return [Group(outer, inner, r) for r in rows]
    return [Group(r, outer, inner) for r in rows]


def random_splits(total: int, groups: int, seed: int = 0) -> list[int]:
    """Differences of sorted random cuts, which may coincide: sizes that sum to `total`, zeros among them."""
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, total) for _ in range(groups - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def unbalanced_splits(average: int, groups: int, seed: int = 0) -> list[int]:
    """Sizes between 0.2 and 1.8 times the average, multiples of 8."""
    generator = torch.Generator().manual_seed(seed)
    low, high = int(0.2 * average), max(int(1.8 * average), 1)
    return (torch.randint(low, high, (groups,), generator=generator) // 8 * 8).tolist()


# Groups, tokens in all, K, N of Transformer Engine's list test.
LIST_GEMMS = ((1, 127, 128, 512), (8, 15, 128, 512), (8, 1027, 128, 512), (16, 10027, 128, 512))

# Groups that agree in nothing, in M, in N.
ALL_DIFFERENT = {
    "squares": [Group(256, 256, 256), Group(512, 512, 256), Group(512, 256, 512)],
    "same_m": [Group(128, 256, 384), Group(128, 512, 128), Group(128, 384, 256)],
    "same_n": [Group(256, 128, 384), Group(512, 128, 128), Group(384, 128, 256)],
    "all": [Group(128, 512, 384), Group(256, 128, 512), Group(384, 256, 128), Group(64, 704, 40)],
}

# 20 groups of 512 to 6016 tokens, hidden sizes 2048 and 512; the empty ones come with the test.
WGRAD_TOKENS = [512 + 128 * ((i * 29) % 44) for i in range(20)]

EDGE_ROWS = [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257]
EDGE_K_ALIGNED = [0, 8, 24, 40, 8192]
EDGE_K = [1, *EDGE_K_ALIGNED]
EDGE_N_ALIGNED = [8, 24, 704, 1408, 2880]
EDGE_N = [1, *EDGE_N_ALIGNED]

# Token counts by group: every place that an empty group can stand in.
EDGE_SPLITS = {
    "one_group": [100],
    "all_empty": [0, 0, 0],
    "first_empty": [0, 40, 24],
    "middle_empty": [40, 0, 24],
    "last_empty": [40, 24, 0],
    "everything_in_one": [0, 0, 130, 0],
    "one_row_each": [1] * 8,
    "neighbours_empty": [20, 0, 0, 30, 0, 14],
}

# k-grouped shape on which a peer's descriptors raced: M, N and the groups' K.
RACE_M, RACE_N, RACE_KS = 768, 2048, [128, 128, 256, 256, 128, 256, 256, 256]

GROUP_COUNTS = [0, 1, 64, 85, 128, 500, 1024, 5000]


class ModelShape(NamedTuple):
    """One projection of an MoE layer: `groups` experts, their average tokens, and the weight [n, k]."""

    label: str
    groups: int
    tokens: int
    n: int
    k: int
    spread: str  # of the tokens over the experts: one of SPREADS

    def splits(self) -> list[int]:
        """Tokens of each expert, multiples of 8 (but for equal ones)."""
        return SPREADS[self.spread](self.tokens, self.groups)


def shared_out(share: torch.Tensor, total: int) -> list[int]:
    """`total` tokens in these shares, rounded down to multiples of 8."""
    return (share / share.sum() * total).int().div(8, rounding_mode="floor").mul(8).tolist()


def dirichlet_splits(average: int, groups: int) -> list[int]:
    """Shares drawn from Dirichlet(0.5)."""
    share = torch._standard_gamma(torch.full((groups,), 0.5), generator=torch.Generator().manual_seed(0))
    return shared_out(share, groups * average)


def zipf_splits(average: int, groups: int) -> list[int]:
    """The expert of rank r gets a share of r ** -1.2; the ranks are in random order."""
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(0))
    return shared_out((order + 1.0) ** -1.2, groups * average)


def all_or_none_splits(average: int, groups: int) -> list[int]:
    """The average or nothing, each with probability one half: decoding."""
    return (torch.randint(0, 2, (groups,), generator=torch.Generator().manual_seed(0)) * average).tolist()


def part_empty_splits(average: int, groups: int) -> list[int]:
    """30 % of the experts get nothing, the others unequal numbers, about as many tokens in all as without."""
    splits = unbalanced_splits(round(average / 0.7), groups)
    for i in torch.randperm(groups, generator=torch.Generator().manual_seed(0))[: round(0.3 * groups)].tolist():
        splits[i] = 0
    return splits


SPREADS: dict[str, Callable[[int, int], list[int]]] = {
    "equal": lambda average, groups: [average] * groups,
    "unequal": unbalanced_splits,
    "skewed": dirichlet_splits,
    "zipf": zipf_splits,
    "one-hot": lambda average, groups: [average * groups * (i == groups // 2) for i in range(groups)],
    "empty30": part_empty_splits,
    "all-or-none": all_or_none_splits,
}


# What the benchmark times. The first two carry the project's speed bars.
MODEL_SHAPES = (
    ModelShape("8 experts", 8, 4096, 768, 2048, "equal"),
    ModelShape("16 experts", 16, 2048, 768, 2048, "equal"),
    ModelShape("16 experts", 16, 2048, 768, 2048, "unequal"),
    ModelShape("Qwen3-30B up", 128, 512, 1536, 2048, "unequal"),
    ModelShape("Qwen3-30B down", 128, 512, 2048, 768, "unequal"),
    ModelShape("DeepSeek-V3 up", 8, 4096, 4096, 7168, "unequal"),
    ModelShape("DeepSeek-V3 up", 32, 1024, 4096, 7168, "unequal"),
    ModelShape("Mixtral up", 8, 4096, 28672, 4096, "equal"),
    ModelShape("gpt-oss up", 32, 512, 5760, 2880, "unequal"),
    ModelShape("64 experts", 64, 1024, 2048, 2048, "skewed"),
    ModelShape("small groups", 32, 64, 768, 2048, "unequal"),
    ModelShape("decode", 128, 8, 1536, 2048, "all-or-none"),
)
