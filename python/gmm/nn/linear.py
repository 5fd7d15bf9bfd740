"""gmm.nn.GroupedLinear."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from gmm.check import check, check_d_dtype, dtype_name
from gmm.grouped_mm import grouped_mm
from gmm.nn.products import GroupedLinearFunction, add_weight_grads, weight_grads
from gmm.ragged.autograd import autocast_is_on, without_autocast
from gmm.weight_grad import Groups, Owner, WeightGrad


class GroupedLinear(nn.Module):
    """A linear map for each group of rows: y = x @ weight[g]^T + bias[g] for the rows x of group g.

    Args:
        num_groups: E, the number of groups (experts).
        in_features: K.
        out_features: N.
        bias: whether there is one, [N] a group.
        parameter_per_group: the parameters are weight0, weight1, ... of [N, K] (and bias0, ...), as Transformer Engine
            has them, instead of weight of [E, N, K] (and bias of [E, N]). load_state_dict() takes either form into
            either.
        fuse_wgrad_accumulation: backward adds the gradients of weights to their attribute main_grad (float32, or the
            dtype of x), in the kernel. Megatron's attributes of a weight count: overwrite_main_grad (overwrites
            instead); grad_added_to_main_grad (where there is one, it becomes True, and the weight gets a grad of
            arbitrary values for hooks to fire, zeros with zero_out_wgrad). Without the second the weight gets no grad.
        delay_wgrad_compute: backward leaves the gradients of weights to backward_dw().
        sm_margin: SMs to leave to other kernels, such as communication; on backends that can.
        device: of the parameters. On "meta" they have no memory: to_empty() and reset_parameters().
        dtype: of the parameters.

    Under torch.autocast it computes in autocast's dtype. Compiles with fullgraph=True, but with
    fuse_wgrad_accumulation or delay_wgrad_compute, which run outside of compiled code. Frozen weights, those that do
    not require grad, get no gradient anywhere. create_graph=True and torch.func are for calls with offs or with sizes
    on the device, and without those two options.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        parameter_per_group: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        sm_margin: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, Integral) or size < 0:
                raise ValueError(f"{name}: expected an integer >= 0, got {size!r}")
        num_groups, in_features, out_features = int(num_groups), int(in_features), int(out_features)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.parameter_per_group = parameter_per_group and num_groups > 0
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.sm_margin = sm_margin
        self._names = {"weight": self._add("weight", (out_features, in_features), device, dtype)}
        self._names["bias"] = self._add("bias", (out_features,), device, dtype) if bias else []
        self._pending: deque[tuple[WeightGrad, list[int]]] = deque()  # with the versions of the tensors in it
        self._hooks: list[Callable[[], None]] = []
        self.reset_parameters()

    def _add(
        self, name: str, shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> list[str]:
        """Registers the parameters called that, and returns their names."""
        if self.parameter_per_group:
            names, shapes = [f"{name}{i}" for i in range(self.num_groups)], [shape] * self.num_groups
        else:
            names, shapes = [name], [(self.num_groups, *shape)]
        for parameter, size in zip(names, shapes, strict=True):
            self.register_parameter(parameter, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        return names

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(in_features), each group as nn.Linear."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Tensor,
        m_splits: Sequence[int] | Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        offs: Tensor | None = None,
    ) -> Tensor:
        """Applies each group's map to its rows.

        Args:
            x: [..., in_features], in the dtype of the parameters: the rows of group 0, then those of group 1, ...
            m_splits: number of rows of each group: a list or a tensor on the CPU, which must sum to the rows of x
                (compiled code does not look into the tensor), or a tensor on the device of x, which the host does not
                read. Rows after the last group give zeros.
            is_first_microbatch: True: main_grad is overwritten instead of added to, with fuse_wgrad_accumulation.
            offs: in the place of m_splits, the ends of the groups: [E], int32 or int64, on the device of x.

        Returns:
            [..., out_features].

        Raises:
            ValueError: not exactly one of m_splits and offs; a list of another length than num_groups, with a size that
                is negative or no integer, or of another sum than the rows of x.
            RuntimeError: shapes, dtypes or devices contradict; a weight without main_grad that should have one.

        Of parameters that are DTensors, sharded in the groups, this process' groups count alone: x and the sizes, as a
        tensor on the device or as offs, are theirs. Not with fuse_wgrad_accumulation or delay_wgrad_compute.

        Never synchronises. Sizes on the device go with a weight of one parameter: those of parameter_per_group are
        copied into one tensor first.
        """
        rows, groups = self._rows_and_groups(x, m_splits, offs)
        if self._owns_weight_grads:
            y = self._forward_as_owner(rows, groups, bool(is_first_microbatch))
        elif isinstance(groups, Tensor):
            bias = self._stacked("bias") if self._names["bias"] else None
            y = grouped_mm(rows, self._stacked("weight"), groups, bias, trans_b=True, sm_margin=self.sm_margin)
        else:
            y = GroupedLinearFunction.apply(rows, groups, None, False, self.sm_margin, *self._parameters_in_order())
        return y.view(*x.shape[:-1], self.out_features)

    @torch.compiler.disable
    def _forward_as_owner(self, rows: Tensor, groups: Groups, overwrite: bool) -> Tensor:
        owner, parameters = self._owner(rows), self._parameters_in_order()
        return GroupedLinearFunction.apply(rows, groups, owner, overwrite, self.sm_margin, *parameters)

    def _rows_and_groups(
        self, x: Tensor, m_splits: Sequence[int] | Tensor | None, offs: Tensor | None
    ) -> tuple[Tensor, Groups]:
        """forward()'s arguments, checked: x as [T, in_features], and the ends or sizes of the groups."""
        if x.dim() < 2 or x.shape[-1] != self.in_features:  # dynamo cannot trace check() on symbolic sizes
            raise RuntimeError(f"x: expected shape [..., rows, {self.in_features}], got {list(x.shape)}")
        dtype = self._tensors("weight")[0].dtype if self._names["weight"] else x.dtype
        if x.dtype is not dtype and not autocast_is_on(x.device):
            raise RuntimeError(f"x: expected {dtype_name(dtype)} (the dtype of weight), got {dtype_name(x.dtype)}")
        rows = x.flatten(0, -2)
        return rows, self._groups(rows, m_splits, offs)

    def _groups(self, rows: Tensor, m_splits: Sequence[int] | Tensor | None, offs: Tensor | None) -> Groups:
        if (m_splits is None) == (offs is None):
            raise ValueError(f"m_splits, offs: expected one of them, got {'none' if offs is None else 'both'}")
        if offs is not None:
            if not isinstance(offs, Tensor):  # what is no tensor counts as sizes from here on
                raise RuntimeError(f"offs: expected a tensor, got {type(offs).__name__}")
            return offs
        if isinstance(m_splits, Tensor):
            if m_splits.is_floating_point():
                raise RuntimeError(f"m_splits: expected integers, got {dtype_name(m_splits.dtype)}")
            if m_splits.device.type != "cpu" or torch.compiler.is_compiling():
                check(m_splits.dim() == 1, "m_splits: expected 1 dimension, got {}", m_splits.dim())
                return m_splits.to(rows.device).cumsum(0, dtype=torch.int32)
            m_splits = m_splits.tolist()
        assert m_splits is not None
        sizes = tuple(m_splits)
        if len(sizes) != self.num_groups:
            raise ValueError(f"m_splits: expected {self.num_groups} sizes (num_groups), got {len(sizes)}")
        for i, size in enumerate(sizes):
            if isinstance(size, float) or size < 0:
                raise ValueError(f"m_splits[{i}]: expected an integer >= 0, got {size}")
        if sum(sizes) != rows.shape[0]:
            raise ValueError(f"m_splits: expected sizes that sum to {rows.shape[0]} (the rows of x), got {sum(sizes)}")
        return sizes

    def _tensors(self, name: str) -> list[nn.Parameter]:
        return [getattr(self, parameter) for parameter in self._names[name]]

    def _stacked(self, name: str) -> Tensor:
        """All groups' weights or biases; of a DTensor those that this process has."""
        tensors = self._tensors(name)
        if not self.parameter_per_group:
            return _local(tensors[0])
        with without_autocast(tensors[0].device):  # whose rule for stack refuses one 16-bit dtype while it is the other
            return torch.stack(list(tensors))

    def _parameters_in_order(self) -> tuple[Any, ...]:
        weights = self._tensors("weight")
        return len(weights), *weights, *self._tensors("bias")

    # Where the gradients of weights go.

    @property
    def _owns_weight_grads(self) -> bool:
        """Whether autograd does not get them."""
        return self.fuse_wgrad_accumulation or self.delay_wgrad_compute

    def _owner(self, x: Tensor) -> Owner | None:
        """Who takes them of a call with that x. Raises where main_grad cannot take them."""
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            self._main_grads(torch.get_autocast_dtype(x.device.type) if autocast_is_on(x.device) else x.dtype)
        return self if self._owns_weight_grads else None

    def take_weight_grad(self, pending: WeightGrad) -> Sequence[Tensor | None]:
        """Called by backward: the gradient's product, or its place in the queue. Returns the weights' grads."""
        if not self.delay_wgrad_compute:
            return self._weight_grads(pending)
        self._pending.append((pending, _versions(pending)))
        return [None] * len(self._names["weight"])

    def backward_dw(self) -> None:
        """Computes the weight gradients that the oldest backward has left, with delay_wgrad_compute: into main_grad
        with fuse_wgrad_accumulation, else added to grad. Does not synchronise.

        Raises:
            RuntimeError: no backward has left any; x, the gradient of the result or offs has been changed in place
                since then.

        Weights that are frozen get none.
        """
        if not self.delay_wgrad_compute:
            return
        weights = self._tensors("weight")
        if not any(weight.requires_grad for weight in weights):
            self._pending.clear()
            return
        if not self._pending:
            raise RuntimeError("backward_dw: expected a backward before it, got none whose weight gradients are left")
        pending, versions = self._pending[0]
        if versions != _versions(pending):
            raise RuntimeError("backward_dw: expected x, its gradient and offs as they were, got one changed in place")
        with torch.no_grad():
            grads = self._weight_grads(pending)
            if not self.fuse_wgrad_accumulation:
                for weight, grad in zip(weights, grads, strict=True):
                    if weight.requires_grad and grad is not None:
                        grad = grad.to(weight.dtype)  # float32, where autocast gave x another dtype
                        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        self._pending.popleft()
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Has backward_dw() call the hook at its end, when the gradients are there: what a data-parallel wrapper would
        do in a hook of the weight, which fires in backward."""
        self._hooks.append(hook)

    def _weight_grads(self, pending: WeightGrad) -> Sequence[Tensor | None]:
        weights = self._tensors("weight")
        dy, x, groups, overwrite = pending
        if not self.fuse_wgrad_accumulation:
            return weight_grads(dy, x, weights, groups, self.sm_margin)
        accumulate = not (overwrite or getattr(weights[0], "overwrite_main_grad", False))
        add_weight_grads(dy, x, self._main_grads(x.dtype), groups, accumulate, self.sm_margin)
        return [_mark_added(weight) if weight.requires_grad else None for weight in weights]

    def _main_grads(self, dtype: torch.dtype) -> list[Tensor | None]:
        """In float32 or in the dtype of x; None for weights that are frozen."""
        grads: list[Tensor | None] = []
        for name, weight in zip(self._names["weight"], self._tensors("weight"), strict=True):
            grad = getattr(weight, "main_grad", None)
            if not weight.requires_grad:
                grads.append(None)
                continue
            if grad is None or grad.shape != weight.shape:
                got = "none" if grad is None else list(grad.shape)
                raise RuntimeError(f"{name}.main_grad: expected a tensor of shape {list(weight.shape)}, got {got}")
            check_d_dtype(f"{name}.main_grad", grad.dtype, dtype, "x")
            expected = "{}.main_grad: expected a tensor on {} (where the weight is), got one on {}"
            check(grad.device == weight.device, expected, name, weight.device, grad.device)
            grads.append(grad)
        return grads

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes both forms of the parameters; Transformer Engine's extra state says nothing about them."""
        state_dict.pop(f"{prefix}_extra_state", None)
        errors: list[str] = args[-1]
        for name, own in self._names.items():
            whole, per_group = f"{prefix}{name}", [f"{prefix}{name}{i}" for i in range(self.num_groups)]
            if self.parameter_per_group and own and whole in state_dict:
                stacked = state_dict.pop(whole)
                if stacked.dim() and len(stacked) == self.num_groups:
                    state_dict.update(zip(per_group, stacked.unbind(), strict=True))
                else:
                    errors.append(f"{whole}: expected {self.num_groups} groups, got shape {list(stacked.shape)}")
            elif not self.parameter_per_group and own and per_group and all(key in state_dict for key in per_group):
                tensors = [state_dict.pop(key) for key in per_group]
                shapes = {tuple(x.shape) for x in tensors}
                if len(shapes) == 1:
                    state_dict[whole] = torch.stack(tensors)
                else:
                    errors.append(f"{whole}0, ...: expected one shape for all groups, got {sorted(shapes)}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Sizes, and what differs from the defaults."""
        text = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={bool(self._names['bias'])}"
        for option in ("parameter_per_group", "fuse_wgrad_accumulation", "delay_wgrad_compute", "sm_margin"):
            if getattr(self, option):
                text += f", {option}={getattr(self, option)}"
        return text


def _local(parameter: Tensor) -> Tensor:
    """Of a DTensor, which expert parallelism shards in the groups, those that this process has."""
    to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _versions(pending: WeightGrad) -> list[int]:
    """A number for each of its tensors, which rises with every change in place."""
    return [x._version for x in pending if isinstance(x, Tensor)]


def _mark_added(weight: nn.Parameter) -> Tensor | None:
    """Tells Megatron that main_grad has the gradient. A grad of any values lets the hooks of the weight fire."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
