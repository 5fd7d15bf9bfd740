"""grouped_mm as an op: schemas, errors, opcheck, torch.compile, torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from check import NAN, begin_alike, same_bits
from conftest import Target
from grouped_cases import (
    BF16,
    FP16,
    FP32,
    MODES,
    ODD_SIZES,
    G,
    K,
    N,
    T,
    compare,
    expected,
    layer_operands,
    operands,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gmm

DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]
modes = pytest.mark.parametrize("mode", MODES)

Arguments = dict[str, Any]


def test_schemas() -> None:
    assert str(torch.ops.gmm.grouped_mm.default._schema) == (
        "gmm::grouped_mm(Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None, *, ScalarType? out_dtype=None, "
        'bool trans_b=False, bool allow_tf32=False, int sm_margin=0, str backend="auto") -> Tensor'
    )
    assert str(torch.ops.gmm.grouped_mm_out.default._schema) == (
        "gmm::grouped_mm_out(Tensor a, Tensor b, Tensor? offs, Tensor? bias, Tensor(e!) out, *, bool trans_b=False, "
        'bool accumulate=False, bool allow_tf32=False, int sm_margin=0, str backend="auto") -> ()'
    )


# Errors


def valid(device: str | torch.device) -> Arguments:
    """A call that is in order, out poisoned."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=BF16, device=device)

    offs = torch.tensor([5, 5, 18], dtype=torch.int32).to(device)
    out = torch.full((T, N), NAN, dtype=BF16, device=device)
    return {"a": ones(T, K), "b": ones(G, N, K), "offs": offs, "bias": ones(G, N), "out": out, "trans_b": True}


def put(argument: str, *shape: int, dtype: torch.dtype | None = None) -> Callable[[Arguments], None]:
    """Replaces one tensor by one of another shape or dtype."""

    def change(call: Arguments) -> None:
        old = call[argument]
        call[argument] = torch.ones(shape, device=old.device).to(dtype or old.dtype)

    return change


def several(*changes: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    def change(call: Arguments) -> None:
        for each in changes:
            each(call)

    return change


def no(argument: str) -> Callable[[Arguments], None]:
    return lambda call: call.update({argument: None})


def written_over(argument: str) -> Callable[[Arguments], None]:
    """out begins where that operand does."""

    def change(call: Arguments) -> None:
        call[argument], call["out"] = begin_alike(call[argument], call["out"])

    return change


def to_ragged_k(call: Arguments) -> None:
    call.update(a=call["a"].new_ones(8, T), b=call["a"].new_ones(T, N), trans_b=False, out=call["a"].new_ones(G, 8, N))


# What is wrong, how it is made so, and what the text must hold.
ROWS: dict[str, tuple[Callable[[Arguments], Any], list[str]]] = {
    "a_1d": (put("a", K), ["a:", "2 or 3", "1"]),
    "a_4d": (put("a", 1, 1, T, K), ["a:", "2 or 3", "4"]),
    "b_1d": (put("b", K), ["b:", "2 or 3", "1"]),
    "b_4d": (put("b", 1, G, N, K), ["b:", "2 or 3", "4"]),
    "contraction": (put("b", G, N, K + 8), ["b:", str(K), "columns", str(K + 8)]),
    "contraction_not_transposed": (lambda call: call.update(trans_b=False), ["b:", str(K), "rows", str(N)]),
    "no_offs": (no("offs"), ["offs:", "2", "3", "None"]),
    "offs_with_batches": (put("a", G, T, K), ["offs:", "None", "3 dimensions"]),
    "offs_2d": (put("offs", G, 1), ["offs:", "1 dimension", "2"]),
    "offs_float": (put("offs", G, dtype=FP32), ["offs:", "int32", "int64", "float32"]),
    "offs_length": (put("offs", G + 1), ["offs:", str(G), str(G + 1)]),
    "batch_sizes": (several(no("offs"), no("bias"), put("a", G + 1, T, K)), ["b:", str(G + 1), str(G)]),
    "dtypes": (put("b", G, N, K, dtype=FP16), ["b:", "bfloat16", "float16"]),
    "a_dtype": (put("a", T, K, dtype=torch.float64), ["a:", "bfloat16", "float32", "float64"]),
    "a_integer": (put("a", T, K, dtype=torch.int8), ["a:", "bfloat16", "int8"]),
    "bias_shape": (put("bias", G, N + 1), ["bias:", f"[{G}, {N}]", f"[{G}, {N + 1}]"]),
    "bias_1d": (put("bias", N), ["bias:", f"[{G}, {N}]", f"[{N}]"]),
    "bias_dtype": (put("bias", G, N, dtype=FP32), ["bias:", "bfloat16", "float32", "out"]),
    "bias_ragged_k": (to_ragged_k, ["bias:", "None"]),
    "out_shape": (put("out", N, T), ["out:", f"[{T}, {N}]", f"[{N}, {T}]"]),
    "out_3d": (put("out", 1, T, N), ["out:", f"[{T}, {N}]", f"[1, {T}, {N}]"]),
    "out_dtype": (put("out", T, N, dtype=FP16), ["out:", "bfloat16", "float32", "float16"]),
    "out_overlaps_itself": (lambda call: call.update(out=call["out"][:1].expand(T, N)), ["out:", "share memory"]),
    "out_over_a": (written_over("a"), ["out:", "memory of its own", "of a"]),
    "out_over_b": (written_over("b"), ["out:", "memory of its own", "of b"]),
    "sm_margin": (lambda call: call.update(sm_margin=-1), ["sm_margin:", "0", "-1"]),
    "backend": (lambda call: call.update(backend="cutlas"), ["backend:", "cutlas", "cutlass", "triton", "cublas"]),
}


def message(call: Arguments) -> str:
    """The text of the error that the call raises; the call must write nothing."""
    before = call["out"].clone()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        gmm.grouped_mm(**call)
    assert call["out"].is_meta or same_bits([call["out"]], [before]), "out was written"
    return str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", ROWS)
def test_bad_call(row: str, device: str) -> None:
    """Each names the argument, what was expected and what came; with one text for all devices, and without out."""
    make_bad, fragments = ROWS[row]
    call, reference = valid(device), valid("cpu")
    make_bad(call)
    make_bad(reference)
    text = message(call)
    assert all(f in text for f in fragments), text
    assert text == message(reference)
    if not row.startswith("out"):
        del call["out"]
        with pytest.raises((ValueError, RuntimeError)) as caught:
            gmm.grouped_mm(**call)
        assert str(caught.value) == text
        for name in ("a", "b", "bias"):
            if call[name] is not None and call[name].is_floating_point():
                call[name].requires_grad_()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            gmm.grouped_mm(**call)
        assert str(caught.value) == text, "with gradients"


@pytest.mark.parametrize("row", [r for r in ROWS if r not in ("backend", "out_overlaps_itself")])
def test_bad_call_compiled(row: str, compiled: Callable[..., Any]) -> None:
    """What torch.compile sees are fake tensors; the text is the same, within what it adds."""
    make_bad, _ = ROWS[row]
    reference = valid("cpu")
    make_bad(reference)
    text = message(reference)
    with FakeTensorMode():
        fake = valid("cpu")
        make_bad(fake)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            gmm.grouped_mm(**fake)
        assert str(caught.value) == text
    if row in ("contraction", "no_offs", "offs_length", "dtypes"):
        make_bad(call := valid("cpu"))
        with pytest.raises(Exception, match=r"(?s).*") as caught:
            compiled(lambda: gmm.grouped_mm(**call), backend="eager")()
        assert text in str(caught.value)


@pytest.mark.parametrize("argument", ("b", "offs", "bias", "out"))
@pytest.mark.parametrize("device", DEVICES)
def test_devices_that_differ(device: str, argument: str) -> None:
    call = valid(device)
    other = "meta" if device == "cpu" else "cpu"
    call[argument] = torch.empty_like(call[argument], device=other)
    with pytest.raises(RuntimeError) as caught:
        gmm.grouped_mm(**call)
    assert all(f in str(caught.value) for f in (f"{argument}:", device, other)), str(caught.value)


def test_out_dtype_and_what_excludes_out() -> None:
    call = valid("cpu")
    out = call.pop("out")
    for dtype in (FP16, torch.float64):
        with pytest.raises(RuntimeError, match=r"out_dtype: expected bfloat16 .* or float32, got float(16|64)"):
            gmm.grouped_mm(**call, out_dtype=dtype)
    for options in ({"accumulate": True}, {"out": out, "out_dtype": FP32}, {"out": out, "weight_grad_out": out}):
        with pytest.raises(ValueError, match="|".join(options)):
            gmm.grouped_mm(**call, **options)
    for argument in ("a", "b", "bias", "out"):
        with_grad = {**call, "out": out, argument: {**call, "out": out}[argument].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"^{argument}: .*grad"):
            gmm.grouped_mm(**with_grad)
        with torch.no_grad():
            gmm.grouped_mm(**with_grad)


def test_backends_that_need_cuda_refuse_cpu_tensors() -> None:
    for backend in ("cutlass", "cublas"):
        text = message({**valid("cpu"), "backend": backend})
        assert f"backend '{backend}' cannot take this call: it needs CUDA tensors, a is on cpu" in text
    assert "interpreter" in message({**valid("cpu"), "backend": "triton"})


def test_lists_refuse_triton(auto_target: Target) -> None:
    x = [torch.ones(8, 8, device=auto_target.device)]
    with pytest.raises(RuntimeError, match="backend 'triton' .*: it takes the tensors of grouped_mm"):
        gmm.multi_tensor_gemm(x, x, backend="triton")


def test_environment(python: Callable[..., Any]) -> None:
    """A backend of the environment that cannot take a call is replaced, with one warning; Triton's for lists, too."""
    code = """
import torch, gmm, warnings
x, offs = torch.ones(8, 8), torch.tensor([4, 8])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        gmm.grouped_mm(x, torch.ones(2, 8, 8), offs)
        gmm.multi_tensor_gemm([x], [x])
print(gmm.last_backend())
for warning in caught:
    print("warned:", warning.message)
"""
    for backend, reason in (("triton", "interpreter"), ("cutlass", "CUDA")):
        ran, *warned = python(code, GMM_BACKEND=backend, TRITON_INTERPRET="0").stdout.splitlines()
        assert ran.startswith("reference")
        assert len(warned) == 1 and all(word in warned[0] for word in ("GMM_BACKEND", backend, reason)), warned


def test_freed_memory() -> None:
    call = valid("cpu")
    call["out"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"out: .*memory"):
        gmm.grouped_mm(**call)


# opcheck


@modes
def test_opcheck(auto_target: Target, mode: str) -> None:
    a, b, offs = layer_operands(mode, auto_target.device)
    bias = torch.randn(G, N).to(a) if b.dim() == 3 else None
    inputs = [x if x is None else x.requires_grad_() for x in (a, b, bias)]
    torch.library.opcheck(torch.ops.gmm.grouped_mm, (inputs[0], inputs[1], offs, inputs[2]))
    a, b, offs = layer_operands(mode, auto_target.device, BF16)
    torch.library.opcheck(torch.ops.gmm.grouped_mm, (a, b.mT, offs), {"trans_b": True, "out_dtype": FP32})
    out = torch.ones_like(gmm.grouped_mm(a, b, offs))
    torch.library.opcheck(torch.ops.gmm.grouped_mm_out, (a, b, offs, None, out), {"accumulate": True})


# torch.compile and torch.export


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """torch.compile(fullgraph=True) from a clean cache."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield lambda f, **options: torch.compile(f, fullgraph=True, **options)
    torch._dynamo.reset()


def test_compiled_weight_grad_out_of_any_size(compiled: Callable[..., Any]) -> None:
    """One compiled function for layers of different sizes, which dynamo then takes as symbols."""
    f = compiled(lambda x, w, offs, out: gmm.grouped_mm(x, w, offs, weight_grad_out=out), backend="eager")
    for k in (4, 8, 12):
        x, w, offs, out = torch.ones(6, k), torch.ones(3, k, 5), torch.tensor([1, 3, 5]), torch.zeros(3, k, 5)
        f(x, w.requires_grad_(), offs, out).sum().backward()
        assert torch.equal(out[:, 0, 0], torch.tensor([1.0, 2.0, 2.0]))
    with pytest.raises(RuntimeError, match=r"weight_grad_out: expected shape \[3, 4, 5\], got \[3, 5, 4\]"):
        gmm.grouped_mm(
            torch.ones(6, 4), torch.ones(3, 4, 5).requires_grad_(), offs, weight_grad_out=torch.ones(3, 5, 4)
        )


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_layer(auto_target: Target, compiled: Callable[..., Any], backend: str) -> None:
    """Forward and backward of an MoE layer with biases and weight_grad_out, in one graph."""
    device, generator = auto_target.device, torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    offs = torch.tensor([5, 5, 18], dtype=torch.int32, device=device)
    inputs = [parameter(T, K), parameter(G, N, K), parameter(G, K, N), parameter(G, N)]

    def layer(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor, main_grad: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(gmm.grouped_mm(x, w1, offs, bias, trans_b=True))
        return gmm.grouped_mm(hidden, w2, offs, trans_b=True, weight_grad_out=main_grad)

    def step(f: Callable[..., Tensor]) -> list[Tensor]:
        main_grad = torch.ones_like(inputs[2])
        y = f(*inputs, main_grad)
        return [y, *torch.autograd.grad(y.sum(), [inputs[0], inputs[1], inputs[3]]), main_grad]

    for x, y in zip(step(compiled(layer, backend=backend)), step(layer), strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", ("default", pytest.param("max-autotune", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize(("ragged", "m", "n", "k", "all_ends"), ODD_SIZES, ids=[row[0] for row in ODD_SIZES])
def test_compiled_odd_sizes(
    auto_target: Target,
    compiled: Callable[..., Any],
    ragged: str,
    m: int,
    n: int,
    k: int,
    all_ends: Any,
    dynamic: bool,
    mode: str,
) -> None:
    """torch's own odd sizes, in all dtypes."""
    if mode != "default" and auto_target.device.type == "cpu":
        pytest.skip("there is nothing to tune")
    f = compiled(gmm.grouped_mm, dynamic=dynamic, mode=mode)
    for dtype in (BF16, FP16, FP32):
        for ends in all_ends:
            a, b, offs = operands(ragged, ends, m, n, k, dtype, auto_target.device)
            y = f(a, b, offs)
            compare(y, *expected(a, b, offs, y, None, False))


def test_compiled_out(auto_target: Target, compiled: Callable[..., Any]) -> None:
    def f(x: Tensor, w: Tensor, offs: Tensor, out: Tensor) -> Tensor:
        gmm.grouped_mm(x.t(), w, offs, out=out, accumulate=True)
        return out * 2

    x = torch.randn(T, K, device=auto_target.device)
    offs = torch.tensor([5, 5, 18], device=auto_target.device)
    outs = [torch.ones(G, K, K, device=auto_target.device) for _ in range(2)]
    results = [compiled(f, backend="inductor")(x, x, offs, outs[0]), f(x, x, offs, outs[1])]
    assert torch.equal(*results) and torch.equal(*outs)


def test_compiled_once_for_all_token_counts(auto_target: Target, compiled: Callable[..., Any]) -> None:
    """Forward and backward, in the three ragged modes."""
    device = auto_target.device
    w = torch.randn(G, K, N, device=device, requires_grad=True)

    def f(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        y = gmm.grouped_mm(x, w, offs)
        columns = gmm.grouped_mm(w.mT, x.t(), offs)  # [N, T]
        return y.sum() + columns.sum() + gmm.grouped_mm(x.t(), y, offs).sum()

    run = compiled(f, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (20, 7, 64, 129):
            x = torch.randn(tokens, K, device=device, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 0)
            offs = torch.tensor([3, 3, tokens - 1], dtype=torch.int32, device=device)
            ours, exact = run(x, w, offs), f(x, w, offs)
            assert torch.allclose(ours, exact, rtol=1e-4)
            for g, h in zip(*(torch.autograd.grad(y, [x, w]) for y in (ours, exact)), strict=True):
                assert torch.allclose(g, h, rtol=1e-4, atol=1e-3)


def test_compiled_autocast(auto_target: Target, compiled: Callable[..., Any]) -> None:
    x, w, offs = layer_operands("ragged_m", auto_target.device)

    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=BF16):
            return gmm.grouped_mm(x, w, offs)

    ours = compiled(f, backend="aot_eager")(x, w)
    assert ours.dtype == BF16 and torch.equal(ours, f(x, w))


def test_export(auto_target: Target) -> None:
    """torch.export keeps the op as one node, with a dynamic number of tokens."""

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
            return gmm.grouped_mm(x, w, offs, trans_b=True)

    x, w, offs = layer_operands("ragged_m", auto_target.device)
    w = w.mT.contiguous()
    dynamic = {"x": {0: torch.export.Dim("tokens")}, "w": None, "offs": None}
    program = torch.export.export(Module(), (x, w, offs), dynamic_shapes=dynamic)
    assert "gmm.grouped_mm.default" in [str(node.target) for node in program.graph.nodes]
    for tokens in (T, 33):
        x = torch.randn(tokens, K, device=auto_target.device)
        assert torch.equal(program.module()(x, w, offs), Module()(x, w, offs))
