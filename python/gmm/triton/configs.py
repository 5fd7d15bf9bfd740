"""Which tile a call takes: a short table by dtype and rows a group, filtered by the device's shared memory.

Of what changes from step to step only the average of rows a group counts, rounded up to a power of two: a new number of
tokens rarely takes another tile, and then one of a few. Pure host code.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """A tile of out, its step along K, and how it is computed."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int  # tiles of a and b in flight
    group_m: int = 8  # height of the bands in which an output is rasterised


# By the rows of a group at most; in each list the first that fits. 227 KB of shared memory: H100 and B200; 163: A100;
# 99: RTX 3090, 4090 and 5090; 64: MI300. 16 rows are the least for mma.sync, 64 rows and 4 warps for wgmma.
_HALF = {
    16: [Config(16, 128, 128, 4, 4), Config(16, 128, 64, 4, 4), Config(16, 128, 64, 4, 3)],
    32: [Config(32, 128, 128, 4, 4), Config(32, 128, 64, 4, 4), Config(32, 128, 64, 4, 2)],
    64: [Config(64, 128, 64, 4, 4), Config(64, 128, 64, 4, 3), Config(64, 128, 32, 4, 4)],
    128: [Config(128, 128, 64, 4, 3), Config(128, 64, 32, 4, 4)],
    256: [
        Config(128, 256, 64, 8, 4),
        Config(128, 256, 64, 8, 3),
        Config(128, 128, 64, 8, 3),
        Config(128, 64, 32, 4, 4),
    ],
}
_TF32 = {
    16: [Config(16, 128, 64, 4, 3), Config(16, 128, 32, 4, 3)],
    32: [Config(32, 128, 32, 4, 4), Config(32, 128, 32, 4, 3)],
    64: [Config(64, 128, 32, 4, 4), Config(64, 128, 32, 4, 3), Config(64, 64, 32, 4, 3)],
    128: [Config(128, 128, 32, 8, 3), Config(64, 64, 32, 4, 3)],
    256: [Config(128, 256, 32, 8, 4), Config(128, 256, 32, 8, 3), Config(128, 128, 32, 8, 3), Config(64, 64, 32, 4, 3)],
}
# FMA, no tensor cores: a thread holds its rows and columns of a whole K step in registers, hence the short one.
_IEEE = {
    16: [Config(16, 64, 32, 4, 3)],
    32: [Config(32, 64, 16, 4, 3)],
    64: [Config(64, 64, 16, 4, 3)],
    256: [Config(128, 128, 16, 8, 3), Config(64, 64, 16, 4, 3)],
}
_TABLES = {"bfloat16": _HALF, "float16": _HALF, "tf32": _TF32, "float32": _IEEE}


def bucket(rows: int) -> int:
    """An average of rows a group, rounded up to a power of two from 16 on."""
    return 1 << max(4, (rows - 1).bit_length())


def shared_memory(config: Config, dtype: str) -> int:
    """Bytes of shared memory that a program takes at most: the tiles of a and b in flight, or after them that of out on
    its way from the layout of tensor cores to rows; and 1 KiB for barriers."""
    itemsize = 2 if _TABLES[dtype] is _HALF else 4
    in_flight = config.stages * (config.block_m + config.block_n) * config.block_k * itemsize
    return max(in_flight, config.block_m * config.block_n * 4) + 1024


def choose(dtype: str, rows: int, n: int, limit: int) -> Config:
    """The tile for an average of `rows` rows a group and `n` columns, on a device with `limit` bytes of shared memory.

    dtype: "bfloat16", "float16", "float32" (IEEE) or "tf32".
    """
    table = _TABLES[dtype]
    row = min((r for r in table if r >= bucket(rows)), default=max(table))
    tiles = [_narrowed(config, n) for config in table[row]]
    smallest = tiles[-1]._replace(block_m=16, block_n=16, stages=2)  # for a device smaller than any known
    return next((config for config in tiles if shared_memory(config, dtype) <= limit), smallest)


def alternatives(dtype: str, n: int, limit: int) -> list[Config]:
    """Every tile of the table that fits."""
    tiles = (_narrowed(config, n) for row in _TABLES[dtype].values() for config in row)
    return list(dict.fromkeys(config for config in tiles if shared_memory(config, dtype) <= limit))


def _narrowed(config: Config, n: int) -> Config:
    """No wider than out, but for the 16 columns that a product of tiles needs."""
    return config._replace(block_n=min(config.block_n, max(16, 1 << (n - 1).bit_length())))
