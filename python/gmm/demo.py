"""python -m gmm.demo: trains a small MoE layer through grouped GEMM and checks every product of it against fp64.

On the CUDA device if there is one, else on the CPU. Exits non-zero when a result is wrong or the loss does not fall.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gmm
from gmm.cli.output import print_table, track
from gmm.cli.selftest import exact_product, of_bound

DTYPE = torch.bfloat16
EXPERTS, TOP_K = 8, 2

Tensors = Sequence[Tensor]


@dataclass
class Product:
    """y[i] = x[i] @ w[i]^T of one grouped linear; the tensors keep their gradients."""

    name: str
    x: Tensors
    w: Tensors
    y: Tensors


class MoE(nn.Module):
    """SwiGLU experts; each token goes through the TOP_K that its router scores highest. fp32 weights, bf16 products."""

    def __init__(self, hidden: int, ffn: int, device: torch.device) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS, bias=False, device=device)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * ffn, hidden, device=device) / math.sqrt(hidden))
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, ffn, device=device) / math.sqrt(ffn))
        self.record: list[Product] | None = None  # a list: forward() puts its products there

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]. Synchronises: the experts' token counts are needed on the host."""
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs by expert
        counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        gate, value = self._linear("up", x[order // TOP_K].to(DTYPE), self.up, counts).chunk(2, dim=-1)
        y = self._linear("down", nn.functional.silu(gate) * value, self.down, counts)
        return torch.zeros_like(x).index_add(0, order // TOP_K, y * scores.flatten()[order, None])

    def _linear(self, name: str, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        rows, weights = x.split(counts), weight.to(DTYPE).unbind()
        y = gmm.multi_tensor_gemm(rows, weights, trans_b=True)
        if self.record is not None:
            for t in (*rows, *weights, *y):
                t.retain_grad()
            self.record.append(Product(name, rows, weights, y))
        return torch.cat(y)


class Task:
    """Regression: tokens lie around EXPERTS centres, and each centre has a linear map of its own."""

    def __init__(self, tokens: int, hidden: int, device: torch.device) -> None:
        self.tokens, self.device = tokens, device
        self.centers = torch.randn(EXPERTS, hidden, device=device)
        self.maps = torch.randn(EXPERTS, hidden, hidden, device=device) / math.sqrt(hidden)

    def loss(self, layer: MoE) -> Tensor:
        """Of the layer on a fresh batch; 1 is what guessing zero gets."""
        cluster = torch.randint(EXPERTS, (self.tokens,), device=self.device)
        x = self.centers[cluster] + 0.2 * torch.randn(self.tokens, self.centers.shape[1], device=self.device)
        target = torch.zeros_like(x)
        for i in range(EXPERTS):
            target[cluster == i] = x[cluster == i] @ self.maps[i]
        return nn.functional.mse_loss(layer(x.requires_grad_()), target) / target.square().mean()


def train(layer: MoE, task: Task, steps: int) -> list[float]:
    """AdamW on fresh batches. Returns the loss of each step."""
    lr = 0.4 / layer.router.in_features  # Adam moves every weight alike, and a wider sum moves more
    optimizer = torch.optim.AdamW(layer.parameters(), lr=lr)
    losses = []
    for _ in track(range(steps), "training"):
        loss = task.loss(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@dataclass
class Row:
    """One call, timed, and the results of it and of autograd compared with fp64."""

    name: str
    ran: str  # backend: kernel
    seconds: float
    tflops: float
    error: float  # largest |result - exact|, relative to the largest |exact|
    of_bound: float  # see gmm.cli.selftest.of_bound()

    @property
    def passed(self) -> bool:
        return self.of_bound <= 1


def check_product(product: Product) -> Iterator[Row]:
    """Forward, dgrad and wgrad as autograd ran them, and wgrad accumulated in fp32 as into a main_grad."""
    name, x, w, y = product.name, product.x, product.w, product.y
    dy = grads(y)
    yield check_call(f"{name} forward", x, w, y, trans_b=True)
    yield check_call(f"{name} dgrad", dy, w, grads(x))
    yield check_call(f"{name} wgrad", dy, x, grads(w), trans_a=True)
    yield check_call(f"{name} wgrad += fp32", dy, x, [], trans_a=True, accumulate=True)


def grads(tensors: Tensors) -> Tensors:
    """Their gradients; zeros where the loss does not depend on them."""
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


@torch.no_grad()
def check_call(
    name: str,
    a: Tensors,
    b: Tensors,
    from_autograd: Tensors,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
) -> Row:
    """Runs and times the call; compares its results and those from autograd."""
    left, right = [t.t() if trans_a else t for t in a], [t.t() if trans_b else t for t in b]
    shapes = [(s.shape[0], t.shape[1]) for s, t in zip(left, right, strict=True)]
    dtype = torch.float32 if accumulate else DTYPE
    start = [torch.randn(shape, dtype=dtype, device=a[0].device) for shape in shapes]
    d = [t.clone() for t in start]

    def run() -> Tensors:
        return gmm.multi_tensor_gemm(a, b, d, trans_a=trans_a, trans_b=trans_b, accumulate=accumulate)

    results, ran = [t.clone() for t in run()], gmm.last_backend()
    seconds = measure(run, a[0].device)
    flops = sum(2 * s.numel() * t.shape[1] for s, t in zip(left, right, strict=True))

    error = largest = torch.zeros((), dtype=torch.float64, device=a[0].device)
    worst = 0.0
    for i in (i for i, t in enumerate(d) if t.numel()):
        exact, scale = exact_product(left[i], right[i], start[i] if accumulate else None)
        largest = largest.maximum(exact.abs().amax())
        for result in (results[i], *from_autograd[i : i + 1]):
            error = error.maximum((result - exact).abs().amax())
            worst = max(worst, of_bound(result, exact, scale, left[i].shape[1]))
    return Row(name, ran, seconds, flops / seconds / 1e12, (error / largest).item(), worst)


def measure(run: Callable[[], Tensors], device: torch.device) -> float:
    """Median seconds of a call. On CUDA, of ten calls in a row, so that the host's time does not show."""

    def once() -> float:
        if device.type != "cuda":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 10 / 1e3

    return statistics.median(once() for _ in range(7))


def show(rows: Sequence[Row]) -> None:
    """A table of the rows."""
    header = ("product", "backend: kernel", "ms", "TFLOP/s", "max rel. error", "of bound", "")
    lines = []
    for row in rows:
        time_and_rate = f"{row.seconds * 1e3:.3f}", f"{row.tflops:.3g}"
        errors = f"{row.error:.1e}", f"{row.of_bound:.2f}"
        lines.append((row.name, row.ran, *time_and_rate, *errors, "ok" if row.passed else "WRONG"))
    print_table("Every product, by its largest difference from fp64", header, lines)


def show_plans() -> None:
    """What an H100 or H200 runs for the gate and up projection of Qwen3-30B: 128 experts with 512 tokens each."""
    experts, tokens, n, k = 128, 512, 1536, 2048
    x, w, dy = [(tokens, k)] * experts, [(n, k)] * experts, [(tokens, n)] * experts
    print(f"\nOn an H100 or H200, for {experts} experts x {tokens} tokens, {k} -> {n}, bf16:")
    for name, plan in {
        "forward": gmm.explain(x, w, trans_b=True, sm=90),
        "dgrad": gmm.explain(dy, w, sm=90),
        "wgrad += fp32": gmm.explain(dy, x, trans_a=True, accumulate=True, out_dtype=torch.float32, sm=90),
    }.items():
        print(f"\n{name}\n{plan}")


def main() -> int:
    """Returns the exit status."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    hidden, ffn, tokens, steps = (2048, 768, 16384, 100) if cuda else (128, 96, 256, 60)
    print(f"gmm {gmm.__version__} on {torch.cuda.get_device_name() if cuda else 'the CPU'}")
    print(f"a SwiGLU MoE layer: {EXPERTS} experts, top {TOP_K}, hidden {hidden}, ffn {ffn}, {tokens} tokens a step")

    layer, task = MoE(hidden, ffn, device), Task(tokens, hidden, device)
    losses = train(layer, task, steps)
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    learned = last < first / 2
    print(f"loss {first:.3f} -> {last:.3f}" + ("" if learned else "  IT SHOULD HAVE HALVED") + "\n")

    layer.record = []
    task.loss(layer).backward()
    rows = [row for product in layer.record for row in check_product(product)]
    show(rows)
    show_plans()
    return 0 if learned and all(row.passed for row in rows) else 1


if __name__ == "__main__":
    # The CPU's products are small: threads that wait for one another took ten times as long on a busy machine.
    torch.set_num_threads(1)
    sys.exit(main())
