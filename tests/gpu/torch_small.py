"""A few steps on 256x256 matrices: an unmodified PyTorch program, small enough for a tool that watches each instruction.
Prints one JSON line."""
import json

import torch

torch.manual_seed(0)
x = torch.randn(256, 256, device="cuda")
w = torch.randn(256, 256, device="cuda") / 16
for _ in range(8):
    x = torch.tanh(x @ w) + 0.5 * x
    x = x - x.mean(dim=1, keepdim=True)
print(json.dumps({"result": x.double().sum().item().hex()}))
