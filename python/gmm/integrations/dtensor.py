"""torch.distributed.tensor: gmm.grouped_mm, its op and its gradients on DTensors.

    gmm.integrations.dtensor.register()

Dimensions that no group cuts may be sharded: M, N and K of a group, and the batch where there is no offs. So tensor
parallelism needs no to_local(); the result is sharded, or partial where K is. What is sharded otherwise is gathered
first, and so are weights that are sharded in the experts, of a call with offs: which rows are those of a process' first
expert is told by the ends of the others. Expert parallelism sends the tokens instead, and multiplies local tensors:
examples/expert_parallel.py.
"""

from __future__ import annotations

from typing import Any

import torch

_OP = torch.ops.gmm.grouped_mm.default


def register() -> None:
    """Registers the op's sharding. May be called again; costs the import of torch.distributed.tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(_OP)(_shardings)
    # Of the keyword arguments, register_sharding has DTensor's cache tell integers apart only: after a call without
    # trans_b, one with it would get the other's result shape (torch 2.14).
    names = [argument.name for argument in _OP._schema.arguments if argument.kwarg_only]
    info = RuntimeSchemaInfo(static_argnum=100, static_kwargkey=names, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[_OP] = info


def _shardings(a: Any, b: Any, offs: Any = None, bias: Any = None, *, trans_b: bool = False, **_: Any) -> list[Any]:
    """The placements of out, and of a, b, offs and bias, on one dimension of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    everywhere = Replicate()
    a_dims, b_dims = len(a.shape), len(b.shape)
    out_dims = 3 if a_dims == b_dims else 2
    k_of_b, n_of_b = (b_dims - 1, b_dims - 2) if trans_b else (b_dims - 2, b_dims - 1)

    def placed(out: Any, a: Any, b: Any, bias_place: Any = everywhere) -> tuple[list[Any], list[Any]]:
        rest = [None if offs is None else everywhere, None if bias is None else bias_place]
        return [out], [a, b, *rest]

    shardings = [placed(everywhere, everywhere, everywhere)]
    if not (a_dims < b_dims):  # else offs cuts M
        shardings.append(placed(Shard(out_dims - 2), Shard(a_dims - 2), everywhere))
    if not (a_dims > b_dims):
        shardings.append(placed(Shard(out_dims - 1), everywhere, Shard(n_of_b), Shard(1)))
    if not (a_dims == b_dims == 2) and bias is None:
        shardings.append(placed(Partial(), Shard(a_dims - 1), Shard(k_of_b)))
    if a_dims == b_dims == 3:
        shardings.append(placed(Shard(0), Shard(0), Shard(0), Shard(0)))
    if bias is None:  # linear in each
        shardings += [placed(Partial(), Partial(), everywhere), placed(Partial(), everywhere, Partial())]
    return shardings
