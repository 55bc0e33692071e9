#!/usr/bin/env python3
"""A Python program that brings a message-passing library into the global scope before it loads the driver, as bindings of such
libraries do. Prints what it saw; with the shim the library has to see what the driver sees.
Environment: BEFORE, the library (tests/laws/before.c)."""
import ctypes
import os
import signal
import sys
import time

before = ctypes.CDLL(os.environ["BEFORE"], mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL("libcuda.so.1")
before.before_calls.restype = cuda.sim_calls.restype = ctypes.c_ulong
shimmed = any("libvramshim" in line for line in open("/proc/self/maps"))
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
entries = [name.encode() for name in ("cuMemAlloc_v2", "cuMemFree_v2")]


def ok(result):
    if result:
        sys.exit(f"the driver answered {result}")


ok(cuda.cuInit(0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
for _ in range(10):
    ok(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)))
    ok(cuda.cuMemFree_v2(pointer))
if shimmed:
    signal.raise_signal(signal.SIGUSR1)
    while not cuda.sim_calls(b"cuMemFree_v2"):
        time.sleep(0.001)
ok(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)))
for entry in entries:
    seen, made = before.before_calls(entry), cuda.sim_calls(entry)
    if seen != (made if shimmed else 0):
        sys.exit(f"{entry.decode()}: the driver was called {made} times, the library saw {seen}")
print("the driver's answers are right")
