import gpu, torch
torch.cuda.keep(8, 64 * gpu.MIB)
