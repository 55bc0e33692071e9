"""Shares CUDA tensors between a parent and a child that it spawned, in both directions: an unmodified
torch.multiprocessing program. Prints one JSON line."""
import json
import sys

import torch
import torch.multiprocessing

ROUNDS, WAIT = 3, 60


def child(to_child, to_parent, read):
    for _ in range(ROUNDS):
        tensor = to_child.get(timeout=WAIT)
        to_parent.put(tensor.sum().item())
        tensor.add_(1)
        own = torch.arange(1 << 20, device="cuda", dtype=torch.float64)
        torch.cuda.synchronize()
        to_parent.put(own)
        read.acquire(timeout=WAIT)  # ours must live until the parent is done with it
        to_parent.put(own.sum().item())
        del tensor, own
    torch.cuda.ipc_collect()


def main():
    context = torch.multiprocessing.get_context("spawn")
    to_child, to_parent, read = context.Queue(), context.Queue(), context.Semaphore(0)
    process = context.Process(target=child, args=(to_child, to_parent, read), daemon=True)
    process.start()
    seen = []
    for i in range(ROUNDS):
        tensor = torch.full((1 << 20,), float(i), device="cuda", dtype=torch.float64)
        torch.cuda.synchronize()
        to_child.put(tensor)
        seen.append(to_parent.get(timeout=WAIT))  # what the child saw
        other = to_parent.get(timeout=WAIT)
        seen += [tensor.sum().item(), other.sum().item()]  # what the child made of ours, and its own
        other.mul_(2)
        torch.cuda.synchronize()
        read.release()
        seen.append(to_parent.get(timeout=WAIT))  # what we made of the child's
        del tensor, other
        torch.cuda.empty_cache()
    process.join(WAIT)
    print(json.dumps({"result": seen, "child": process.exitcode}))
    return process.exitcode != 0


if __name__ == "__main__":
    sys.exit(main())
