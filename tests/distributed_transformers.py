"""What test_transformers.py runs: `torchrun --nproc-per-node 2 tests/distributed_transformers.py FOLDER`.

The folder has a model and, in expected.pt, its token ids and logits.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import gmm.integrations.transformers

if __name__ == "__main__":
    torch.set_num_threads(1)
    gmm.integrations.transformers.register()
    ids, logits = torch.load(f"{sys.argv[1]}/expected.pt")
    for sizes in ({"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}):  # by all-reduce, and by all-to-all
        config = DistributedConfig(**sizes)
        model = AutoModelForCausalLM.from_pretrained(
            sys.argv[1], experts_implementation="gmm", distributed_config=config, dtype=torch.float32
        )
        experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
        assert experts.num_experts == 3 and isinstance(experts.down_proj, DTensor)
        error = (model(ids).logits - logits).norm() / logits.norm()
        assert error <= 2e-6, (sizes, error)
        print(f"rank {dist.get_rank()}: {sorted(sizes)} passed", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # as examples/expert_parallel.py
