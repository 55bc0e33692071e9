"""Holds a large cache of a framework and little live memory, idles, and goes on: unmodified PyTorch or CuPy.

    idle.py torch|cupy [--mib N] [--rounds N] [--wait SECONDS] [--empty]

Prints "held" when it begins to idle, for that many seconds or, with 0, until it gets a line; with --empty it has emptied the
cache by itself before that, timed. Prints one JSON line in the end."""
import argparse
import json
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("framework", choices=["torch", "cupy"])
parser.add_argument("--mib", type=int, default=8192)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--wait", type=float, default=2)
parser.add_argument("--empty", action="store_true")
args = parser.parse_args()

MIB = 1 << 20
# Half in blocks of 64 MiB, half in those of 20 MiB that torch takes for smaller tensors.
SIZES = [64 * MIB] * (args.mib // 128) + [20 * MIB] * (args.mib // 40)

if args.framework == "torch":
    import torch

    live = torch.arange(1000, device="cuda")

    def fill():
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in SIZES]
        blocks[0].fill_(1)
        blocks[-1].fill_(2)
        torch.cuda.synchronize()
        return int(blocks[0].max()) + int(blocks[-1].max())

    empty = torch.cuda.empty_cache

    def kept():
        return []
else:
    import cupy

    live = cupy.arange(1000)
    pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()

    def fill():
        blocks = [cupy.empty(size, dtype=cupy.uint8) for size in SIZES]
        host = [cupy.cuda.alloc_pinned_memory(16 * MIB) for _ in range(8)]
        blocks[0].fill(1)
        blocks[-1].fill(2)
        cupy.cuda.Device().synchronize()
        return int(blocks[0].max()) + int(blocks[-1].max()) + len(host)

    def empty():
        pool.free_all_blocks()
        pinned.free_all_blocks()

    def kept():
        return [pinned.n_free_blocks()]


results, times = [], []
for _ in range(args.rounds):
    results.append(fill())
    if args.empty:
        start = time.perf_counter()
        empty()
        times.append((time.perf_counter() - start) * 1e3)
    print("held", flush=True)
    if args.wait:
        time.sleep(args.wait)
    else:
        sys.stdin.readline()
    results += kept() + [int((live * 2).sum())]
print(json.dumps({"result": results, "ms": times}), flush=True)
