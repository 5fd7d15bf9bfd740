"""The activation between the two products of an MoE layer, its gate and the routing weights, in one op."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gmm.check import DTYPES, check, check_no_tangents, dtype_name
from gmm.moe.launch import Activation, activation_backward_in_triton, activation_in_triton, takes
from gmm.moe.register import register


class Kind(NamedTuple):
    """function(gate) * (up + shift), or function(gate) alone."""

    function: str  # of derivatives() below, and of activation_kernels.py
    gated: bool
    alpha: float = 1.0  # silu(x) is x * sigmoid(alpha * x)
    shift: float = 0.0


KINDS: dict[str, Kind] = {
    "swiglu": Kind("silu", True),
    "geglu": Kind("gelu", True),
    "geglu_tanh": Kind("gelu_tanh", True),
    "reglu": Kind("relu", True),
    "swiglu_oai": Kind("silu", True, 1.702, 1.0),
    "silu": Kind("silu", False),
    "gelu": Kind("gelu", False),
    "gelu_tanh": Kind("gelu_tanh", False),
    "relu": Kind("relu", False),
    "relu2": Kind("relu2", False),
    "identity": Kind("identity", False),
}
"""The activations by name, and whether each has a gate; gated_activation has their formulas."""


def gated_activation(
    h: Tensor,
    kind: str = "swiglu",
    *,
    up: Tensor | None = None,
    interleaved: bool = False,
    limit: float | None = None,
    weights: Tensor | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """weights[r] * function(gate[r]) * up[r], or weights[r] * function(h[r]), for every row r.

    Args:
        h: [R, 2*I], gate and up side by side; [R, I], the gate alone where up is given, or where the kind has no gate.
            bfloat16, float16 or float32.
        kind: with a gate "swiglu" (gate * sigmoid(gate) * up), "geglu" (erf), "geglu_tanh", "reglu", and "swiglu_oai"
            (gate * sigmoid(1.702 * gate) * (up + 1), of gpt-oss); without "silu", "gelu", "gelu_tanh", "relu", "relu2"
            and "identity" (of which weights are left).
        up: [R, I], in the dtype of h.
        interleaved: h has gate and up in turn: h[:, 0::2] and h[:, 1::2].
        limit: first gate is clamped to at most limit, and up to -limit..limit. None: neither is. For kinds with a gate.
        weights: [R] factors of the rows, of any dtype above: routing weights in the order of the rows.
        offs: [E] ends of the experts' rows. Rows at and after the last are not read: zeros in the result and in the
            gradients. Without it such a row is what h makes it: zeros for the zeros that grouped_mm puts there.

    Returns:
        [R, I] in the dtype of h. Computed in float32, rounded once.

    Raises:
        ValueError: unknown kind; up, interleaved or limit that the kind, or one another, does not allow; a limit that
            is not positive.
        RuntimeError: shapes, dtypes or devices contradict.

    One kernel forward, and one backward for all gradients; backward keeps h, and computes the function again.
    Derivatives of any order. Does not synchronise.
    """
    check_options(kind, up is not None, interleaved, limit)
    check_no_tangents("gated_activation", h, up, weights)
    return activation(h, up, weights, offs, kind, interleaved, limit)


def check_options(kind: str, up: bool, interleaved: bool, limit: float | None) -> None:
    """ValueError as gated_activation() raises it; up: whether it is given."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    for name, given in (("up", up), ("interleaved", interleaved), ("limit", limit is not None)):
        if given and not KINDS[kind].gated:
            raise ValueError(f"{name}: expected none, as {kind!r} has no gate")
    if up and interleaved:
        raise ValueError("interleaved: expected False, as up is given apart")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit: expected > 0, got {limit}")


def _check(h: Tensor, up: Tensor | None, weights: Tensor | None, offs: Tensor | None, kind: str) -> None:
    """Of the op, not of the function: dynamo cannot trace it."""
    check(h.dim() == 2, "h: expected 2 dimensions, got {}", h.dim())
    check(h.dtype in DTYPES, "h: expected bfloat16, float16 or float32, got {}", dtype_name(h.dtype))
    rows, columns = h.shape
    if KINDS[kind].gated and up is None:
        check(columns % 2 == 0, "h: expected an even number of columns, gate and up, got {}", columns)
    if up is not None:
        check(up.shape == h.shape, "up: expected shape {} (that of h), got {}", list(h.shape), list(up.shape))
        check(
            up.dtype == h.dtype, "up: expected {} (the dtype of h), got {}", dtype_name(h.dtype), dtype_name(up.dtype)
        )
    check_weights(weights, h, "h")
    if offs is not None:
        check(offs.dim() == 1, "offs: expected 1 dimension, got {}", offs.dim())
        check(offs.dtype in (torch.int32, torch.int64), "offs: expected int32 or int64, got {}", dtype_name(offs.dtype))
    for name, x in (("up", up), ("offs", offs)):
        if x is not None:
            expected = "{}: expected a tensor on {} (where h is), got one on {}"
            check(x.device == h.device, expected, name, h.device, x.device)


def check_weights(weights: Tensor | None, x: Tensor, name: str) -> None:
    """Whether they are factors of the rows of x, which is called so. Dynamo cannot trace check() on symbolic sizes."""
    if weights is None:
        return
    if weights.dim() != 1 or weights.shape[0] != x.shape[0]:
        raise RuntimeError(f"weights: expected shape [{x.shape[0]}] (the rows of {name}), got {list(weights.shape)}")
    if weights.dtype not in DTYPES:
        raise RuntimeError(f"weights: expected bfloat16, float16 or float32, got {dtype_name(weights.dtype)}")
    if weights.device != x.device:
        raise RuntimeError(f"weights: expected a tensor on {x.device} (where {name} is), got one on {weights.device}")


# In plain torch.


def value(x: Tensor, function: str, alpha: float) -> Tensor:
    """function(x)."""
    if function == "silu":
        return x * torch.sigmoid(alpha * x)
    if function in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if function == "gelu_tanh" else "none")
    if function == "identity":
        return x
    return torch.relu(x) if function == "relu" else torch.relu(x).square()


def derivative(x: Tensor, function: str, alpha: float) -> Tensor:
    """Of function at x."""
    if function == "silu":
        s = torch.sigmoid(alpha * x)
        return s * (1 + alpha * x * (1 - s))
    if function == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if function == "gelu_tanh":
        c, cubic = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(c * (x + cubic * x * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * cubic * x * x)
    if function == "identity":
        return torch.ones_like(x)
    return (x > 0).to(x.dtype) if function == "relu" else 2 * torch.relu(x)


def _parts(h: Tensor, up: Tensor | None, kind: Kind, interleaved: bool) -> tuple[Tensor, Tensor | None]:
    """Gate and up."""
    if not kind.gated or up is not None:
        return h, up
    if interleaved:
        return h[:, 0::2], h[:, 1::2]
    half = h.shape[1] // 2
    return h[:, :half], h[:, half:]


def _in_group(x: Tensor, offs: Tensor | None) -> Tensor | None:
    """[R, 1]: whether the row is before the last end; None: all are."""
    if offs is None:
        return None
    last = offs[-1] if offs.shape[0] else 0
    return (torch.arange(x.shape[0], device=x.device) < last).unsqueeze(1)


def _activation_in_torch(
    h: Tensor,
    up: Tensor | None,
    weights: Tensor | None,
    offs: Tensor | None,
    kind: str,
    interleaved: bool,
    limit: float | None,
) -> Tensor:
    k = KINDS[kind]
    gate, up = _parts(h, up, k, interleaved)
    gate, up = gate.float(), None if up is None else up.float()
    if limit is not None and up is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = value(gate, k.function, k.alpha)
    if up is not None:
        y = y * (up + k.shift)
    if weights is not None:
        y = y * weights.float().unsqueeze(1)
    kept = _in_group(h, offs)
    return (y if kept is None else torch.where(kept, y, 0)).to(h.dtype)


def activation_backward_in_torch(
    dy: Tensor,
    h: Tensor,
    up: Tensor | None,
    weights: Tensor | None,
    offs: Tensor | None,
    kind: str,
    interleaved: bool,
    limit: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of plain torch operations on all operands, so that it is differentiable itself, to any order."""
    k, kept, whole = KINDS[kind], _in_group(h, offs), up is None

    def operand(x: Tensor) -> Tensor:
        # Rows of no group are left out here, not in the result: NaN in them, times zero, would be NaN in the gradients.
        return x.float() if kept is None else torch.where(kept, x.float(), 0)

    gate, up = _parts(h, up, k, interleaved)
    dy, gate, up = operand(dy), operand(gate), None if up is None else operand(up)
    x, shifted = gate, None if up is None else up + k.shift
    if limit is not None and up is not None:
        x, shifted = gate.clamp(max=limit), up.clamp(-limit, limit) + k.shift
    f = value(x, k.function, k.alpha)
    dweights = dy * (f if shifted is None else f * shifted)
    if weights is not None:
        dy = dy * operand(weights.unsqueeze(1))
    dgate, dup = dy * derivative(x, k.function, k.alpha), dy * f
    if shifted is not None:
        dgate = dgate * shifted
    if limit is not None and up is not None:
        dgate, dup = dgate.masked_fill(gate > limit, 0), dup.masked_fill(up.abs() > limit, 0)
    nothing = h.new_empty(0)
    dw = nothing if weights is None else dweights.sum(1).to(weights.dtype)
    if not k.gated or not whole:
        return dgate.to(h.dtype), nothing if whole else dup.to(h.dtype), dw
    dh = torch.stack([dgate, dup], 2).flatten(1) if interleaved else torch.cat([dgate, dup], 1)
    return dh.to(h.dtype), nothing, dw


# The ops.


def _activation_kernel(h: Tensor, *args: Any) -> Tensor:
    _check(h, *args[:4])
    return activation_in_triton(_call(h, *args)) if takes(h) else _activation_in_torch(h, *args)


def _activation_backward_kernel(dy: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if takes(dy):
        return activation_backward_in_triton(dy, _call(*args))
    return activation_backward_in_torch(dy, *args)


def _call(
    h: Tensor,
    up: Tensor | None,
    weights: Tensor | None,
    offs: Tensor | None,
    kind: str,
    interleaved: bool,
    limit: float | None,
) -> Activation:
    return Activation(h, up, weights, offs, KINDS[kind], interleaved, limit)


def _activation_fake(h: Tensor, up: Tensor | None, weights: Tensor | None, offs: Tensor | None, *args: Any) -> Tensor:
    kind = args[0]
    _check(h, up, weights, offs, kind)
    return h.new_empty((h.shape[0], h.shape[1] // 2 if KINDS[kind].gated and up is None else h.shape[1]))


def _activation_backward_fake(
    dy: Tensor, h: Tensor, up: Tensor | None, weights: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dup = h.new_empty(0 if up is None else up.shape)
    return h.new_empty(h.shape), dup, h.new_empty(0) if weights is None else weights.new_empty(weights.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    h, up, weights, offs = ctx.saved_tensors
    # With create_graph through what torch can differentiate.
    backward = activation_backward_in_torch if torch.is_grad_enabled() else activation_backward
    dh, dup, dw = backward(dy, h, up, weights, offs, *ctx.options)
    needs_h, needs_up, needs_weights = ctx.needs_input_grad[:3]
    nothing = (None,) * 4
    return dh if needs_h else None, dup if needs_up else None, dw if needs_weights else None, *nothing


_ARGUMENTS = "Tensor h, Tensor? up, Tensor? weights, Tensor? offs, str kind, bool interleaved, float? limit"
activation = register(
    "moe_activation", f"({_ARGUMENTS}) -> Tensor", _activation_kernel, _activation_fake, _backward, _save
)
activation_backward = register(
    "moe_activation_backward",
    f"(Tensor dy, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _activation_backward_kernel,
    _activation_backward_fake,
)
