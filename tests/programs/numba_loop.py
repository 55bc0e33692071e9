"""Device arrays made, copied, and dropped in a loop: an unmodified Numba program, and a client of the driver not written by
us (ctypes and dlsym). Runs on a GPU and, because it launches no kernel, on the simulated driver. Prints one JSON line."""
import argparse
import hashlib
import json
import time

import numpy
from numba import cuda

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=200)
args = parser.parse_args()

digest = hashlib.sha256()
random = numpy.random.RandomState(0)
times = []
for i in range(args.rounds):
    source = random.randint(0, 256, size=random.randint(1, 300000), dtype=numpy.uint8)
    start = time.perf_counter()
    array = cuda.to_device(source)
    other = cuda.device_array_like(source)
    other.copy_to_device(array)
    back = other.copy_to_host()
    del array, other
    times.append((time.perf_counter() - start) * 1e3)
    digest.update(back.tobytes())
print(json.dumps({"result": digest.hexdigest(), "ms": times[10:]}))
