"""Trains a small network under torch.profiler: an unmodified PyTorch program. Prints one JSON line, with the number of
kernels that the profiler saw."""
import json

import torch
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(64, 512, device="cuda")


def advance():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


advance()
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    for _ in range(5):
        loss = advance()
    torch.cuda.synchronize()
kernels = sum(str(e.device_type).endswith("CUDA") and not e.name.startswith("Mem") for e in profiler.events())
print(json.dumps({"result": loss.item().hex(), "kernels": kernels}))
