# What a person types into a notebook, a line at a time (checks/drain.py feeds it). The kernel idles between the cells.
# %%
import json, torch
live = torch.arange(1 << 20, device="cuda", dtype=torch.float64)
blocks = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
del blocks
torch.cuda.synchronize(); print("held", flush=True)
# %%
blocks = [torch.full((16 << 20,), i, dtype=torch.int32, device="cuda") for i in range(32)]
print(json.dumps({"result": live.sum().item() + sum(int(b.max()) for b in blocks)}), flush=True)
