"""Trains a 6-layer transformer encoder (d=1024) on random data: an unmodified PyTorch program. Prints one JSON line."""
import argparse
import json
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--warmup", type=int, default=8)
parser.add_argument("--empty-cache-every-step", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order: the last digits differ from run to run
torch.backends.cuda.matmul.allow_tf32 = True
layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
model = torch.nn.TransformerEncoder(layer, 6).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x = torch.randn(16, 256, 1024, device="cuda")
times = []
for step in range(args.warmup + args.steps):
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if args.empty_cache_every_step:
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - start) * 1e3)
print(json.dumps({"result": loss.item().hex(), "ms": times[args.warmup:]}))
