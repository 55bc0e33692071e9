"""A chain of elementwise operations on 16 MiB arrays: an unmodified CuPy program. Prints one JSON line."""
import argparse
import json
import time

import cupy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--warmup", type=int, default=10)
parser.add_argument("--no-pool", action="store_true", help="every array is a cuMemAlloc and a cuMemFree")
args = parser.parse_args()

if args.no_pool:
    cupy.cuda.set_allocator(None)
x = cupy.arange(4 << 20, dtype=cupy.float32)
times = []
for step in range(args.warmup + args.steps):
    start = time.perf_counter()
    y = x
    for _ in range(30):
        y = y * 1.0001 + 0.5
        y = cupy.sqrt(y)
    total = float(y.sum())
    cupy.cuda.Device().synchronize()
    times.append((time.perf_counter() - start) * 1e3)
print(json.dumps({"result": total.hex(), "ms": times[args.warmup:]}))
