"""A DataLoader with two workers, started while the parent has used CUDA: an unmodified PyTorch program.

    torch_loader.py fork|spawn

Prints one JSON line."""
import json
import sys

import torch


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        return torch.full((4096,), float(i))


def main():
    weights = torch.linspace(0, 1, 4096, device="cuda")
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=16, num_workers=2, multiprocessing_context=sys.argv[1],
                                         pin_memory=True, timeout=60)
    total = 0.0
    for _ in range(2):
        for batch in loader:
            total += (batch.cuda(non_blocking=True) * weights).double().sum().item()
    print(json.dumps({"result": total.hex()}))


if __name__ == "__main__":
    main()
