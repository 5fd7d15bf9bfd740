"""Fine-tunes a Hugging Face MoE model with experts_implementation="gmm", on the CPU or a GPU.

    python examples/finetune_transformers.py                                   # a small random Qwen3-MoE, on bytes
    python examples/finetune_transformers.py --model Qwen/Qwen3-30B-A3B --dtype bfloat16 --length 4096 --steps 10
    python examples/finetune_transformers.py --experts grouped_mm              # the library's own, to compare

The text is the project's README, or --text FILE. Needs transformers >= 5: pip install "transformers>=5"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import gmm.integrations.transformers

README = Path(__file__).parents[1] / "README.md"


def small_model(options: argparse.Namespace) -> Any:
    """A Qwen3-MoE of a few hundred thousand parameters, whose tokens are bytes."""
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 96},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096},
        **{"num_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    )
    dtype = getattr(torch, options.dtype)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=options.experts, dtype=dtype)


def model_and_tokens(options: argparse.Namespace) -> tuple[Any, Tensor]:
    text = Path(options.text).read_text()
    if options.model is None:
        return small_model(options), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, experts_implementation=options.experts, dtype=dtype
    )
    tokens = transformers.AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0]
    return model, tokens


def batches(tokens: Tensor, batch: int, length: int, steps: int) -> list[Tensor]:
    """[batch, length] each, from random places of the text."""
    length = min(length, len(tokens) - 1)
    starts = torch.randint(0, len(tokens) - length, (steps, batch), generator=torch.Generator().manual_seed(0))
    return [torch.stack([tokens[start : start + length] for start in row]) for row in starts.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder for from_pretrained; without, a small random model")
    parser.add_argument("--text", default=README)
    parser.add_argument("--experts", default="gmm", help='experts_implementation; "gmm" is this library')
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, default in (("batch", 4), ("length", 128), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    gmm.integrations.transformers.register()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = model_and_tokens(options)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses, started = [], time.perf_counter()
    for ids in batches(tokens, options.batch, options.length, options.steps):
        loss = model(ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()  # waits for the device
    milliseconds = 1e3 * (time.perf_counter() - started) / options.steps
    print(f"{options.experts} on {device}: {options.steps} steps of {milliseconds:.1f} ms, the first among them")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if options.experts == "gmm":
        print(f"the last product ran on {gmm.last_backend()}")


if __name__ == "__main__":
    main()
