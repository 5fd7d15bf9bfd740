#!/usr/bin/env python3
"""Writes the README's figures from benchmarks/results, so that no number there is typed by hand.

python benchmarks/readme_figures.py          rewrites the part between the two markers
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: written by benchmarks/readme_figures.py -->\n", "<!-- end of figures -->\n"


def lists() -> str:
    """Markdown of the tables of multi_tensor_gemm."""
    results = json.loads((RESULTS / "multi_tensor_gemm.json").read_text())
    lines = [
        f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, {results['date']}; bf16; "
        "TFLOP/s of real rows, medians of `do_bench`, methods interleaved in one run, called eagerly.",
        "",
        "| groups × average tokens, N × K | pass | `cutlass` | `cublas` | loop of `torch.mm` | `cutlass` / `cublas` |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        shape = f"{row['groups']} × {row['tokens']} {row['spread']}, {row['n']} × {row['k']}"
        tflops = " | ".join(f"{row['tflops'][method]:.0f}" for method in ("cutlass", "cublas", "loop"))
        lines.append(f"| {shape} | {row['pass']} | {tflops} | {row['cutlass_over_cublas']:.2f} |")
    lines += [
        "",
        "Host time of a call, `d` given, in microseconds:",
        "",
        "| groups | `cutlass` | `cublas` |",
        "|---|---|---|",
    ]
    host = {(row["groups"], row["backend"]): row["python"] for row in results["host"]}
    for groups in sorted({groups for groups, _ in host}):
        lines.append(f"| {groups} | {host[groups, 'cutlass']:.0f} | {host[groups, 'cublas']:.0f} |")
    return "\n".join(lines) + "\n"


PASSES = ("forward", "wgrad", "wgrad-accumulate")  # the others are in the results alone
NAMES = {
    "cutlass": "`cutlass`",
    "triton": "`triton`",
    "torch": "`torch._grouped_mm`",
    "deep_gemm": "DeepGEMM",
    "quack": "quack",
    "dense": "dense `torch.mm`",
}


def ragged() -> str:
    """Markdown of the table of grouped_mm."""
    results = json.loads((RESULTS / "grouped_mm.json").read_text())
    rates = f"{results['dense_tflops']:.0f} TFLOP/s and {results['copy_tb_s']:.1f} TB/s"
    lines = [
        f"The same machine, {results['date']}; DeepGEMM {results['peers']['deep_gemm']} on groups padded to 128 rows, "
        f"quack {results['peers']['quack']} with the best of six tiles. `floor`: the share of the FLOPs' or the bytes' "
        f"own time, whichever is longer, at the rates of a large `torch.mm` and a copy in the same run ({rates}). "
        "dgrad, fp32 gradients that overwrite, fp16 and lists are in `benchmarks/results`.",
        "",
        f"| experts × average tokens, N × K | pass | {' | '.join(NAMES.values())} | `cutlass` / best peer | floor |",
        "|---" * (4 + len(NAMES)) + "|",
    ]
    for row in results["rows"]:
        if row["pass"] not in PASSES:
            continue
        shape = f"{row['groups']} × {row['tokens']} {row['spread']}, {row['n']} × {row['k']}"
        tflops = [f"{row['tflops'][m]:.0f}" if m in row["tflops"] else "–" for m in NAMES]
        ratios = [f"{row['ratios'][r]:.2f}" for r in ("best peer", "floor")]
        lines.append("| " + " | ".join([shape, row["pass"], *tflops, *ratios]) + " |")
    return "\n".join(lines) + "\n"


def host() -> str:
    """Markdown of what a call of grouped_mm costs beside the product."""
    results = json.loads((RESULTS / "grouped_mm.json").read_text())
    lines = [
        f"Host time of a call of `grouped_mm` with 128 experts, without grad, in microseconds "
        f"({results['machine']}, {results['date']}):",
        "",
        "| call | us |",
        "|---|---|",
        *(f"| `{row['call'].replace(', ', '` on `')}` | {row['us']:.0f} |" for row in results["host"]),
    ]
    return "\n".join(lines) + "\n"


def layers() -> str:
    """Markdown of whole MoE layers, and of Hugging Face's experts."""
    results = json.loads((RESULTS / "moe_ops.json").read_text())
    names = {
        "gmm": "gmm",
        "torch products": "the products by `torch._grouped_mm`",
        "torch": "torch's operations alone",
    }
    alone = ("gmm", "torch products")
    lines = [
        "Permute, gate and up, SwiGLU, down, unpermute, forward and backward, bf16; milliseconds, and GiB at the peak; "
        f"and the experts alone, on sorted tokens ({results['gpu']}, torch {results['torch']}, {results['date']}). "
        f"Permute and unpermute run at {of_copy(results['rows'])} % of a copy's bandwidth.",
        "",
        f"| layer | {' | '.join(names.values())} | {' | '.join(f'experts alone: {names[m]}' for m in alone)} |",
        "|---" * (1 + len(names) + len(alone)) + "|",
    ]
    for row in results["rows"]:
        cells = [f"{row['layer_ms'][m]:.2f} ({row['peak_gib'][m]:.2f})" for m in names]
        cells += [f"{row['experts_ms'][m]:.2f}" for m in alone]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    if hf := results["hugging_face"]:
        cells = [f'`"{m}"` {hf["ms"][m]:.2f} ms, {hf["peak_gib"][m]:.2f} GiB' for m in hf["ms"]]
        lines += ["", f"`Qwen3MoeExperts` of transformers {hf['transformers']} at {hf['model']}'s size, by "
                  f"`experts_implementation`: {'; '.join(cells)}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def of_copy(rows: list[dict[str, Any]]) -> str:
    """The least and the greatest share of the ops that only move rows, in percent."""
    shares = [100 * row["of_copy"][op] for row in rows for op in ("permute", "unpermute", "unpermute, weighted")]
    return f"{min(shares):.0f} to {max(shares):.0f}"


def figures() -> str:
    """Markdown of all tables."""
    return f"### Lists\n\n{lists()}\n### `grouped_mm`\n\n{ragged()}\n{host()}\n### Layers\n\n{layers()}"


def updated(readme: str) -> str:
    """The README with the figures that belong there."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + "\n" + figures() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
