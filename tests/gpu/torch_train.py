"""Trains a 4-layer transformer encoder (d=512) on random data, for some time or some steps: an unmodified PyTorch program.

    torch_train.py --seconds S | --steps N  [--empty-every S]

--empty-every: a thread of the program calls torch.cuda.empty_cache() that often. Prints "training" after the warm-up, and one
JSON line in the end, whose result is a digest of the losses of all steps."""
import argparse
import hashlib
import json
import threading
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0)
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--empty-every", type=float, default=0)
args = parser.parse_args()

torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order: the last digits differ from run to run
torch.backends.cuda.matmul.allow_tf32 = True
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
model = torch.nn.TransformerEncoder(layer, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x = torch.randn(32, 256, 512, device="cuda")
digest, times, emptied = hashlib.sha256(), [], []


def advance():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


over = threading.Event()


def keep_emptying():
    while not over.wait(args.empty_every):
        start = time.perf_counter()
        torch.cuda.empty_cache()
        emptied.append((time.perf_counter() - start) * 1e3)


for _ in range(args.warmup):
    loss = advance()
print("training", flush=True)
if args.empty_every:
    threading.Thread(target=keep_emptying, daemon=True).start()
end = time.perf_counter() + args.seconds
while len(times) < args.steps if args.steps else time.perf_counter() < end:
    start = time.perf_counter()
    loss = advance()
    times.append((time.perf_counter() - start) * 1e3)
    digest.update(loss.hex().encode())
over.set()
print(json.dumps({"result": [loss.hex(), digest.hexdigest()], "steps": len(times), "ms": times, "emptied": emptied}), flush=True)
