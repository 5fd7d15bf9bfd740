"""Trains a small MoE language model on characters, on the CPU or a GPU.

    python examples/train_moe_lm.py                        # examples/text.txt
    python examples/train_moe_lm.py --steps 1000 --plot loss.png
    python examples/train_moe_lm.py --json                 # one object, nothing else

Each block is attention and an MoE layer of gmm.nn.GroupedExperts between gmm.moe.permute and unpermute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gmm

TEXT = Path(__file__).with_name("text.txt")


class MoE(nn.Module):
    """top-k of the router's softmax; forward also returns the load-balancing loss, 1 where all experts get the same."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = gmm.nn.GroupedExperts(experts, hidden, 2 * hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, experts = x.flatten(0, 1), self.router.out_features
        probabilities = self.router(tokens).softmax(-1)
        weights, index = probabilities.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        rows, row_map, offs = gmm.moe.permute(tokens, index, experts)
        rows = self.experts(rows, offs=offs, weights=gmm.moe.permute_weights(weights, row_map))
        share = offs.diff(prepend=offs.new_zeros(1)) / index.numel()
        return gmm.moe.unpermute(rows, row_map).view_as(x), experts * (share * probabilities.mean(0)).sum()


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = MoE(hidden, experts, top_k)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        y, balance = self.moe(self.norms[1](x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, vocabulary: int, length: int, options: argparse.Namespace) -> None:
        super().__init__()
        hidden = options.hidden
        self.embed, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, 4, options.experts, options.top_k) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, L, vocabulary] and the mean load-balancing loss of the layers."""
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def train(options: argparse.Namespace, device: str) -> list[float]:
    """The cross-entropy of each step."""
    text = TEXT.read_text()
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text], device=device)
    model = Model(len(characters), options.length, options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[Tensor] = []
    for step in range(options.steps):
        starts = torch.randint(len(ids) - options.length, (options.batch, 1)).to(device)
        chunk = ids[starts + torch.arange(options.length + 1, device=device)]
        logits, balance = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        (loss + options.balance * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if not options.json and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:5d}  loss {loss.item():.3f}  balance {balance.item():.2f}", flush=True)
    return torch.stack(losses).tolist()


def plot(losses: list[float], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.plot(losses)
    pyplot.xlabel("step")
    pyplot.ylabel("cross-entropy per character")
    pyplot.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 200, "batch": 16, "length": 64, "hidden": 64, "layers": 2, "experts": 8, "top-k": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="the load-balancing loss's weight")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss curve (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the losses as JSON")
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    losses = train(options, device)
    seconds = time.perf_counter() - started
    if options.plot:
        plot(losses, options.plot)
    if options.json:
        print(json.dumps({"device": device, "backend": gmm.last_backend(), "seconds": seconds, "losses": losses}))
    else:
        print(f"{seconds:.1f} s on {device}; the last product ran on {gmm.last_backend()}")


if __name__ == "__main__":
    main()
