"""Collectives of NCCL among one process: an unmodified torch.distributed program. Prints one JSON line."""
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_nccl_available():
    print(json.dumps({"skip": "this torch has no NCCL"}))
    sys.exit()
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
torch.cuda.set_device(0)
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    total = 0.0
    for step in range(10):
        x = torch.arange(1 << 20, device="cuda", dtype=torch.float64) * (step + 1)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        gathered = [torch.empty_like(x)]
        dist.all_gather(gathered, x)
        total += gathered[0].sum().item()
        del x, gathered
    torch.cuda.synchronize()
    dist.destroy_process_group()
print(json.dumps({"result": total.hex()}))
