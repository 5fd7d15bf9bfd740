"""Bad input: the error names the argument, the group, what was expected and what came, and nothing has been written.

The text is the same on every device, fake tensors included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import NAN, begin_alike, same_bits
from conftest import Target
from torch._subclasses.fake_tensor import FakeTensorMode

import gmm

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
M, N, K = 24, 40, 16
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]

Arguments = dict[str, Any]


def valid(device: str | torch.device) -> Arguments:
    """A call of three groups that is in order, in the forward layout, d poisoned."""

    def tensors(*shape: int) -> list[torch.Tensor]:
        return [torch.ones(shape, dtype=BF16, device=device) for _ in range(3)]

    d = [torch.full((M, N), NAN, dtype=BF16, device=device) for _ in range(3)]
    return {"a": tensors(M, K), "b": tensors(N, K), "d": d, "bias": tensors(N), "trans_b": True}


def put(argument: str, group: int, *shape: int, dtype: torch.dtype = BF16) -> Callable[[Arguments], None]:
    """Replaces one tensor by one of another shape or dtype."""

    def change(call: Arguments) -> None:
        call[argument][group] = torch.ones(shape, device=call[argument][group].device).to(dtype)

    return change


def drop(argument: str) -> Callable[[Arguments], None]:
    """Takes the last tensor out of a list."""
    return lambda call: call[argument].pop()


def overlapping_d(call: Arguments) -> None:
    call["d"][1] = call["d"][1][:1].expand(M, N)


def repeated_d(call: Arguments) -> None:
    call["d"] = [call["d"][0]] * len(call["d"])


def written_over(argument: str, i: int = 1) -> Callable[[Arguments], None]:
    """d[1] begins where that operand does."""

    def change(call: Arguments) -> None:
        call[argument][i], call["d"][1] = begin_alike(call[argument][i], call["d"][1])

    return change


def both_transposed(call: Arguments) -> None:
    call.update(trans_a=True)


# What is wrong, how it is made so, and what the text must hold.
ROWS: dict[str, tuple[Callable[[Arguments], Any], list[str]]] = {
    "fewer_b": (drop("b"), ["b", "3", "2"]),
    "fewer_a": (drop("a"), ["a", "2", "3"]),
    "fewer_d": (drop("d"), ["d", "3", "2"]),
    "fewer_bias": (drop("bias"), ["bias", "3", "2"]),
    "a_1d": (put("a", 1, M), ["a[1]", "2", "1"]),
    "a_3d": (put("a", 2, 1, M, K), ["a[2]", "2", "3"]),
    "b_3d": (put("b", 1, 1, N, K), ["b[1]", "2", "3"]),
    "d_1d": (put("d", 1, M * N), ["d[1]", "2", "1"]),
    "bias_2d": (put("bias", 1, 1, N), ["bias[1]", "1", "2"]),
    "contraction": (put("b", 1, N, K + 8), ["b[1]", str(K), str(K + 8)]),
    "contraction_zero": (put("b", 2, N, 0), ["b[2]", str(K), "0"]),
    "contraction_transposed": (both_transposed, ["b[0]", str(M), str(K)]),
    "d_rows": (put("d", 1, M + 1, N), ["d[1]", str(M), str(N), str(M + 1)]),
    "d_columns": (put("d", 2, M, 1), ["d[2]", str(M), str(N), "1"]),
    "d_transposed": (put("d", 0, N, M), ["d[0]", str(M), str(N)]),
    "d_dtype": (put("d", 1, M, N, dtype=FP16), ["d[1]", "bfloat16", "float32", "float16"]),
    "d_dtypes_mixed": (put("d", 2, M, N, dtype=FP32), ["d[2]", "bfloat16", "float32"]),
    "a_dtype_among_groups": (put("a", 1, M, K, dtype=FP16), ["a[1]", "bfloat16", "float16"]),
    "b_dtype_among_groups": (put("b", 2, N, K, dtype=FP32), ["b[2]", "bfloat16", "float32"]),
    "a_dtype_unknown": (put("a", 0, M, K, dtype=FP64), ["a[0]", "bfloat16", "float16", "float32", "float64"]),
    "a_dtype_integer": (put("a", 0, M, K, dtype=torch.int8), ["a[0]", "bfloat16", "float16", "float32", "int8"]),
    "bias_length": (put("bias", 1, N - 1), ["bias[1]", str(N), str(N - 1)]),
    "bias_dtype": (put("bias", 1, N, dtype=FP32), ["bias[1]", "bfloat16", "float32"]),
    "d_overlaps_itself": (overlapping_d, ["d[1]"]),
    "d_repeated": (repeated_d, ["d[1]", "memory of its own", "d[0]"]),
    "d_repeated_later": (lambda call: call["d"].__setitem__(2, call["d"][0]), ["d[2]", "memory of its own", "d[0]"]),
    "d_over_another_a": (written_over("a", 0), ["d[1]", "memory of its own", "a[0]"]),
    "d_over_another_b": (written_over("b", 2), ["d[1]", "memory of its own", "b[2]"]),
    "d_over_a": (written_over("a"), ["d[1]", "memory of its own", "a[1]"]),
    "d_over_b": (written_over("b"), ["d[1]", "memory of its own", "b[1]"]),
    "sm_margin": (lambda call: call.update(sm_margin=-1), ["sm_margin", "0", "-1"]),
    "backend_unknown": (lambda call: call.update(backend="cutlas"), ["backend", "cutlas", "cutlass", "cublas"]),
}


def message(call: Arguments) -> str:
    """The text of the error that the call raises; the call must write nothing."""
    before = [x.clone() for x in call["d"]] if call["d"][0].device.type != "meta" else []
    with pytest.raises((ValueError, RuntimeError)) as caught:
        gmm.multi_tensor_gemm(**call)
    assert same_bits(call["d"][: len(before)], before), "d was written"
    return str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", ROWS)
def test_bad_call(row: str, device: str) -> None:
    make_bad, fragments = ROWS[row]
    call = valid(device)
    make_bad(call)
    text = message(call)
    missing = [f for f in fragments if f not in text]
    assert not missing, f"{text!r} lacks {missing}"
    reference = valid("cpu")
    make_bad(reference)
    assert text == message(reference)


@pytest.mark.parametrize("row", [r for r in ROWS if r not in ("backend_unknown", "d_overlaps_itself")])
def test_bad_call_on_fake_tensors(row: str) -> None:
    """What torch.compile sees."""
    make_bad, fragments = ROWS[row]
    with FakeTensorMode():
        call = valid("cpu")
        make_bad(call)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            gmm.multi_tensor_gemm(**call)
    assert all(f in str(caught.value) for f in fragments), str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", [r for r in ROWS if not r.startswith(("d_", "fewer_d"))])
def test_bad_call_of_the_functional_form(row: str, device: str) -> None:
    make_bad, fragments = ROWS[row]
    call = valid(device)
    make_bad(call)
    del call["d"]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        gmm.multi_tensor_gemm(**call)
    assert all(f in str(caught.value) for f in fragments), str(caught.value)
    text = str(caught.value)
    for x in (*call["a"], *call["b"], *call["bias"]):
        if x.is_floating_point():
            x.requires_grad_()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        gmm.multi_tensor_gemm(**call)
    assert str(caught.value) == text, "with gradients"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", ROWS)
def test_bad_call_of_the_op(row: str, device: str) -> None:
    """The op itself checks: it is what other frameworks and compiled graphs call."""
    make_bad, fragments = ROWS[row]
    call = valid(device)
    make_bad(call)
    positional = [call.pop(name) for name in ("a", "b", "d", "bias")]
    before = [x.clone() for x in positional[2]] if device != "meta" else []
    with pytest.raises((ValueError, RuntimeError)) as caught:
        torch.ops.gmm.multi_tensor_gemm(*positional, **call)
    assert all(f in str(caught.value) for f in fragments), str(caught.value)
    assert same_bits(positional[2][: len(before)], before), "d was written"


@pytest.mark.parametrize("argument", ("a", "b", "d", "bias"))
@pytest.mark.parametrize("device", DEVICES)
def test_devices_that_differ(device: str, argument: str) -> None:
    call = valid(device)
    other = "meta" if device == "cpu" else "cpu"
    call[argument][1] = torch.empty_like(call[argument][1], device=other)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        gmm.multi_tensor_gemm(**call)
    assert all(f in str(caught.value) for f in (f"{argument}[1]", device, other)), str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
def test_out_dtype(device: str) -> None:
    call = valid(device)
    del call["d"]
    for dtype, fragments in ((FP16, ["out_dtype", "bfloat16", "float32", "float16"]), (FP64, ["out_dtype", "float64"])):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            gmm.multi_tensor_gemm(**call, out_dtype=dtype)
        assert all(f in str(caught.value) for f in fragments), str(caught.value)


def test_accumulate_needs_d() -> None:
    call = valid("cpu")
    del call["d"]
    with pytest.raises(ValueError, match="accumulate.* d"):
        gmm.multi_tensor_gemm(**call, accumulate=True)


def test_what_excludes_d() -> None:
    """A dtype of new results, and a graph: what is written into d is not differentiable."""
    call = valid("cpu")
    with pytest.raises(ValueError, match="out_dtype: expected None, as d has its own dtype"):
        gmm.multi_tensor_gemm(**call, out_dtype=torch.float32)
    call["b"][1].requires_grad_()
    with pytest.raises(RuntimeError, match=r"b\[1\]: expected a tensor that does not require grad"):
        gmm.multi_tensor_gemm(**call)
    with torch.no_grad():
        gmm.multi_tensor_gemm(**call)


def test_lists_where_one_is_empty() -> None:
    for argument in ("a", "b", "d", "bias"):
        call = valid("cpu")
        call[argument] = []
        with pytest.raises((ValueError, RuntimeError), match=argument):
            gmm.multi_tensor_gemm(**call)
    with pytest.raises((ValueError, RuntimeError), match="d"):
        gmm.multi_tensor_gemm([], [], [torch.zeros(1, 1)])


@pytest.mark.parametrize("backend", ("cutlass", "cublas"))
def test_cuda_backends_refuse_cpu_tensors(backend: str) -> None:
    text = message({**valid("cpu"), "backend": backend})
    assert all(f in text for f in (backend, "CUDA", "cpu")), text


@pytest.mark.gpu
def test_cutlass_refuses_what_it_cannot_take() -> None:
    """With the reason, by argument; nothing is written."""
    fp32 = {key: [x.float() for x in value] if key != "trans_b" else value for key, value in valid("cuda").items()}
    misaligned = valid("cuda")
    misaligned["d"][1] = torch.full((M * N + 1,), NAN, dtype=BF16, device="cuda")[1:].view(M, N)
    for call, fragments in ((fp32, ["cutlass", "fp32"]), (misaligned, ["cutlass", "d[1]", "16"])):
        text = message({**call, "backend": "cutlass"})
        assert all(f in text for f in fragments), text
        gmm.multi_tensor_gemm(**call)  # the automatic choice takes it
        assert gmm.last_backend().startswith("cublas")
        assert all(x.eq(K + 1).all() for x in call["d"])


def test_a_bad_call_leaves_a_working_library(target: Target) -> None:
    """An error is not remembered: the next call is fine."""
    for row in ("contraction", "bias_length", "backend_unknown"):
        call = valid(target.device)
        ROWS[row][0](call)
        message(call)
        good = valid(target.device)
        gmm.multi_tensor_gemm(**good, backend=target.backend)
        assert all(x.eq(K + 1).all() for x in good["d"])


def test_sparse_bias(target: Target) -> None:
    """Nothing is written, also not the groups before it."""
    call = valid(target.device)
    call["d"] = [torch.full_like(x, NAN) for x in call["d"]]
    call["bias"] = [torch.ones(N, dtype=BF16, device=target.device) for _ in call["d"]]
    call["bias"][-1] = call["bias"][-1].to_sparse()
    message({**call, "backend": target.backend})
    assert all(x.isnan().all() for x in call["d"])


def test_freed_memory() -> None:
    """A tensor whose storage was resized to nothing, as sharded parameters are between uses."""
    call = valid("cpu")
    call["d"][1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"d\[1\].*memory"):
        gmm.multi_tensor_gemm(**call)


@pytest.mark.gpu
def test_errors_of_the_reference_keep_their_text() -> None:
    """On their way from Python through the C++ op of CUDA tensors."""
    call = valid("cuda")
    call["d"][1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"d\[1\]: expected memory for shape"):
        gmm.multi_tensor_gemm(**call, backend="reference")


def test_no_suffix_but_a_kernel() -> None:
    with pytest.raises(ValueError, match="backend"):
        gmm.multi_tensor_gemm(**valid("cpu"), backend="auto: any")
