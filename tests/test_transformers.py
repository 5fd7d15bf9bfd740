"""gmm.integrations.transformers with the real library: logits, gradients and generate() of small random models against
its own eager experts, and every variant of an experts module against its own batched_mm."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from check import seeded
from conftest import Target, environment, torchrun
from grouped_cases import BF16, FP32
from torch import Tensor, nn

import gmm
import gmm.integrations.transformers as integration

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune_transformers.py"
VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so that experts matter: with the usual 0.02 they add nothing to the residual
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 6},
    "Mixtral": {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 4},
    "DeepseekV3": {
        **{"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "intermediate_size": 48, "num_key_value_heads": 4, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "Olmoe": {"num_key_value_heads": 2, "intermediate_size": 24, "num_experts": 6},
    "GptOss": {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "num_local_experts": 4},
}
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def transformers() -> Any:
    """The library, with gmm registered."""
    library = pytest.importorskip("transformers", minversion="5")
    integration.register()
    return library


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that the products of gmm's experts ran on."""
    ran: list[str] = []

    def noting(function: Callable[..., Tensor], products: int) -> Callable[..., Tensor]:
        def noted(*args: Any, **options: Any) -> Tensor:
            y = function(*args, **options)
            ran.extend([gmm.last_backend().split(":")[0]] * products)
            return y

        return noted

    monkeypatch.setattr(integration, "grouped_mm", noting(gmm.grouped_mm, 1))
    monkeypatch.setattr(integration, "feed_forward", noting(gmm.moe.feed_forward, 2))
    return ran


def build(transformers: Any, name: str, device: torch.device, dtype: torch.dtype = FP32, **options: Any) -> Any:
    """A model whose every parameter is random, biases too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{"num_experts_per_tok": 2, **SIZES, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config, **options).to(device, dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def prompt(device: torch.device, length: int = 11) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=seeded(torch.device("cpu"), 1)).to(device)


def logits_and_grads(model: Any, implementation: str, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def near(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).norm() <= tolerance * theirs.norm())


@models
def test_logits_and_gradients(transformers: Any, auto_target: Target, calls: list[str], name: str) -> None:
    """Against the library's eager experts, in fp32."""
    model = build(transformers, name, auto_target.device, experts_implementation="gmm")
    ids = prompt(auto_target.device)
    ours, our_grads = logits_and_grads(model, "gmm", ids)
    layers = 1 if name == "DeepseekV3" else 2
    assert len(calls) == 2 * layers
    assert set(calls) <= ({"reference"} if ids.device.type == "cpu" else {"cutlass", "triton"})
    theirs, grads = logits_and_grads(model, "eager", ids)
    assert len(calls) == 2 * layers, "eager ran gmm"
    assert near(ours, theirs, 1e-5)
    assert our_grads.keys() == grads.keys() and any("experts" in n for n in grads)
    for n, grad in grads.items():
        assert grad.any() and near(our_grads[n], grad, 1e-5), n
    without = build(transformers, name, auto_target.device)
    for n, parameter in without.named_parameters():
        if ".experts." in n:
            nn.init.zeros_(parameter)
    assert not near(without(ids).logits, theirs, 0.05), "the experts decide nothing, so this tests nothing"


@models
def test_bfloat16(transformers: Any, auto_target: Target, name: str) -> None:
    """No further from fp32 than the library's own grouped_mm, but for chance. Routers may choose otherwise in bf16,
    so that the experts are compared, not the models."""
    model = build(transformers, name, auto_target.device)
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    x, index, weights = inputs(auto_target.device, experts.num_experts, hidden=32)
    model.set_experts_implementation("eager")
    exact = experts(x, index, weights)
    experts.to(BF16)
    errors = {}
    for implementation in ("gmm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        y = experts(x.to(BF16), index, weights.detach())
        assert y.dtype is BF16
        errors[implementation] = ((y - exact).norm() / exact.norm()).item()
    assert errors["gmm"] <= max(1.2 * errors["grouped_mm"], 2e-3), errors
    model.set_experts_implementation("gmm")
    y = experts(x, index, weights)  # hidden states in fp32, as a norm in fp32 leaves them
    assert y.dtype is FP32 and near(y, exact, 1e-2)


@models
def test_generate(transformers: Any, auto_target: Target, calls: list[str], name: str) -> None:
    model = build(transformers, name, auto_target.device, experts_implementation="eager").eval()
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    want = model.generate(prompt(auto_target.device, 5), **options)
    model.set_experts_implementation("gmm")
    got = model.generate(prompt(auto_target.device, 5), **options)
    assert calls and torch.equal(got, want) and got.shape[1] > 6


def test_fullgraph_compile(transformers: Any, auto_target: Target) -> None:
    model = build(transformers, "Qwen3Moe", auto_target.device, experts_implementation="gmm")
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (7, 12):
        x = torch.randn(tokens, 32, device=auto_target.device, requires_grad=True)
        index = torch.rand(tokens, 6, device=x.device).argsort(1)[:, :2]
        weights = torch.rand(tokens, 2, device=x.device, requires_grad=True)
        leaves = [x, weights, *experts.parameters()]
        results = [
            (y := f(x, index, weights), *torch.autograd.grad(y.square().sum(), leaves)) for f in (compiled, experts)
        ]
        assert all(near(ours, eager, 1e-6) for ours, eager in zip(*results, strict=True))
    torch._dynamo.reset()


def test_autocast_and_checkpointing(transformers: Any, auto_target: Target) -> None:
    """fp32 parameters under autocast: the products are in bf16, the result and the gradients in fp32."""
    model = build(transformers, "Qwen3Moe", auto_target.device, experts_implementation="gmm").train()
    ids = prompt(auto_target.device)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with torch.autocast(ids.device.type, dtype=BF16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), model.model.layers[0].mlp.experts.gate_up_proj.grad.clone()))
    (loss, grad), (loss_again, grad_again) = results
    assert grad.dtype is FP32 and grad.any()
    assert torch.equal(loss, loss_again) and near(grad, grad_again, 1e-6)


# Every variant of an experts module.


def experts_class(transformers: Any, interleaved: bool, **variant: bool) -> type[nn.Module]:
    """As a model's source has it."""

    class Experts(nn.Module):
        def __init__(self, config: Any, act_fn: nn.Module) -> None:
            super().__init__()
            experts, hidden, ffn = config.shape
            self.num_experts, self.act_fn = experts, act_fn
            up = "gate_up_proj" if variant.get("has_gate", True) else "up_proj"
            for name, n, k in ((up, ffn * (1 + (up != "up_proj")), hidden), ("down_proj", hidden, ffn)):
                shape = (experts, k, n) if variant.get("is_transposed") else (experts, n, k)
                setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))
                if variant.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(experts, n) * 0.3))
            if variant.get("has_post_expert_norm"):
                self.post_expert_norm = nn.RMSNorm(hidden)

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise AssertionError("the eager form is not called here")

        if interleaved:

            def _apply_gate(self, gate_up: Tensor) -> Tensor:
                return torch.tanh(gate_up[..., ::2]) * gate_up[..., 1::2]

    decorate = transformers.integrations.moe.use_experts_implementation
    return decorate(is_concatenated=not interleaved, **variant)(Experts)


VARIANTS = [
    {},
    {"is_transposed": True},
    {"has_bias": True},
    {"is_transposed": True, "has_bias": True},
    {"has_gate": False},
    {"has_gate": False, "has_bias": True, "is_transposed": True},
    {"has_post_expert_norm": True},
    {"interleaved": True},
    {"interleaved": True, "has_bias": True, "is_transposed": True},
]
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "mish")


@pytest.fixture
def module(transformers: Any) -> Callable[..., nn.Module]:
    """An experts module of that variant, and how to switch its implementation."""

    class Config:
        shape = (5, 16, 24)
        _experts_implementation = "gmm"

    known = inspect.signature(transformers.integrations.moe.use_experts_implementation).parameters

    def make(variant: dict[str, bool], activation: str, device: torch.device) -> nn.Module:
        if missing := variant.keys() - known.keys() - {"interleaved"}:
            pytest.skip(f"transformers {transformers.__version__} has no {', '.join(missing)}")
        torch.manual_seed(0)
        options = {"interleaved": False, **variant}
        act_fn = transformers.activations.ACT2FN[activation]
        return experts_class(transformers, **options)(Config(), act_fn).to(device)

    return make


def run(module: Any, implementation: str, x: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    module.config._experts_implementation = implementation
    leaves = [x, weights, *module.parameters()]
    y = module(x, index, weights)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def inputs(device: torch.device, experts: int = 5, hidden: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, three experts for each, and weights."""
    generator = seeded(torch.device("cpu"))
    x = torch.randn(33, hidden, generator=generator).to(device).requires_grad_()
    index = torch.rand(33, experts, generator=generator).argsort(1)[:, :3].to(device)
    return x, index, torch.rand(33, 3, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants(auto_target: Target, module: Callable[..., nn.Module], variant: dict[str, bool]) -> None:
    """Of weights' layout, gate and bias."""
    experts = module(variant, "silu", auto_target.device)
    results = [run(experts, name, *inputs(auto_target.device)) for name in ("gmm", "batched_mm")]
    assert all(near(ours, theirs, 1e-5) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_gate", (True, False), ids=("gate", "no-gate"))
def test_activations(auto_target: Target, module: Callable[..., nn.Module], activation: str, has_gate: bool) -> None:
    """Those that gmm knows, and one that it does not."""
    experts = module({"has_gate": has_gate}, activation, auto_target.device)
    known = integration._activation(experts)
    assert (known is None) == (activation == "mish" or (activation == "relu2" and has_gate))
    results = [run(experts, name, *inputs(auto_target.device)) for name in ("gmm", "batched_mm")]
    assert all(near(ours, theirs, 1e-5) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_expert_parallel(auto_target: Target, module: Callable[..., nn.Module], variant: dict[str, bool]) -> None:
    """Tokens of experts elsewhere have the id num_experts and weight 0: they add nothing, and get no gradient."""
    experts = module(variant, "silu", auto_target.device)
    if not hasattr(experts, "_is_expert_parallel"):
        pytest.skip("this transformers' batched_mm knows no experts elsewhere")
    experts._is_expert_parallel = True
    x, index, weights = inputs(auto_target.device, 9)
    index = index.clamp(max=experts.num_experts)
    weights = weights.detach().masked_fill(index == experts.num_experts, 0).requires_grad_()
    results = [run(experts, name, x, index, weights) for name in ("gmm", "batched_mm")]
    assert all(near(ours, theirs, 1e-5) for ours, theirs in zip(*results, strict=True))
    assert not results[0][2][index == experts.num_experts].any()
    nobody = torch.full_like(index, experts.num_experts)
    results = run(experts, "gmm", x, nobody, torch.zeros_like(weights).requires_grad_())
    assert all(not t.any() for t in results)


def test_fine_tuning_example(transformers: Any, auto_target: Target) -> None:
    """Runs, and its loss falls, as much as with the library's own experts."""
    losses = []
    for experts in ("gmm", "eager"):
        variables = {"CUDA_VISIBLE_DEVICES": ""} if auto_target.device.type == "cpu" else {}
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), "--steps=8", "--length=64", "--batch=2", f"--experts={experts}"],
            env=environment(OMP_NUM_THREADS="1", **variables),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert f"{experts} on {auto_target.device.type}" in done.stdout
        found = re.search(r"loss (\S+) -> (\S+)", done.stdout)
        assert found, done.stdout
        losses.append([float(loss) for loss in found.groups()])
    assert losses[0][1] < 0.9 * losses[0][0] and losses[0] == pytest.approx(losses[1], abs=0.01)


def test_spread_over_processes(transformers: Any, tmp_path: Path) -> None:
    """transformers' own expert parallelism, in two processes."""
    pytest.importorskip("accelerate")
    model = build(transformers, "Qwen3Moe", torch.device("cpu"), experts_implementation="eager")
    model.save_pretrained(tmp_path)
    ids = prompt(torch.device("cpu"))
    torch.save((ids, model(ids).logits.detach()), tmp_path / "expected.pt")
    output = torchrun(2, "tests/distributed_transformers.py", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert output.count("passed") == 4, output


# Without transformers.


class Experts(nn.Module):
    """Qwen3-MoE's experts as transformers hands them over."""

    has_gate, has_bias, is_transposed, num_experts = True, False, False, 6

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(self.num_experts, 2 * ffn, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, hidden, ffn) * ffn**-0.5)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        raise AssertionError("gmm has a kernel for it")

    _apply_gate.__module__ = "transformers.integrations.moe"

    def exact(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every token."""
        gate, up = torch.einsum("th,enh->ten", x, self.gate_up_proj).chunk(2, -1)
        y = torch.einsum("ten,ehn->teh", nn.functional.silu(gate) * up, self.down_proj)
        return (y * torch.zeros_like(y[..., 0]).scatter(1, index, weights)[..., None]).sum(1)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_against_fp64(auto_target: Target, calls: list[str], dtype: torch.dtype) -> None:
    """Forward and backward, and on a GPU without a synchronisation."""
    torch.manual_seed(0)
    device = auto_target.device
    experts = Experts(64, 96).to(device, dtype)
    x, index, weights = inputs(device, experts.num_experts, hidden=64)
    x = x.detach().to(dtype).requires_grad_()
    dy = torch.randn(33, 64, generator=seeded(torch.device("cpu"))).to(device, dtype)

    def results(forward: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
        y = forward(leaves[0], index, leaves[1])
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    def forward(*args: Tensor) -> Tensor:
        return integration.experts_forward(experts, *args)

    results(forward, x, weights, *experts.parameters())  # compiles and plans
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        ours = results(forward, x, weights, *experts.parameters())
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 4 and set(calls) <= {"cpu": {"reference"}, "cuda": {"cutlass", "triton"}}[device.type]
    exact = Experts(64, 96).to(device, torch.float64)
    exact.load_state_dict(experts.state_dict())
    x64, weights64 = (t.detach().double().requires_grad_() for t in (x, weights))
    theirs = results(exact.exact, x64, weights64, *exact.parameters())
    tolerance = 1e-6 if dtype is FP32 else 1e-2
    assert ours[0].dtype is dtype and ours[2].dtype is FP32
    assert all(near(a.double(), b, tolerance) for a, b in zip(ours, theirs, strict=True))


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"gmm needs transformers.integrations.moe.*: pip install -U transformers"):
        integration.register()
