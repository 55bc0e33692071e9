"""torch.compile with CUDA graphs of its own (mode="reduce-overhead"): an unmodified PyTorch program. Prints one JSON line."""
import importlib.util
import json
import os
import shutil
import sys

if not importlib.util.find_spec("triton"):
    missing = "Triton is not installed"
elif not any(map(shutil.which, filter(None, [os.environ.get("CC"), "gcc", "cc", "clang"]))):
    missing = "Triton finds no C compiler"
else:
    missing = None
if missing:
    print(json.dumps({"skip": missing}))
    sys.exit()

import torch

torch.manual_seed(0)
x = torch.randn(512, 512, device="cuda")
w = torch.randn(512, 512, device="cuda") / 23


@torch.compile(mode="reduce-overhead")
def advance(x, w):
    return torch.tanh(x @ w) * 1.5 + torch.sin(x)


total = 0.0
with torch.no_grad():
    for i in range(30):
        torch.compiler.cudagraph_mark_step_begin()
        y = advance(x, w)
        x = (y * 0.5 + i).clone()
        total += y.double().sum().item()
print(json.dumps({"result": total.hex()}))
