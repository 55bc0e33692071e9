#!/usr/bin/env python3
"""before.py [stub]: a Python program that brings a message-passing library into the global scope before it loads the driver, as
bindings of such libraries do, and takes it out at the end. With the shim the library has to see what the driver sees; where its
constructor looks the driver up (BEFORE_FIRST), at least each free. With `stub`, a program that knows the driver by a preloaded stub only.
Environment: BEFORE, the library (tests/laws/before.c)."""
import _ctypes
import ctypes
import os
import signal
import sys
import time

if sys.argv[1:] == ["stub"]:
    found, status = ctypes.c_void_p(), ctypes.c_int()
    if ctypes.CDLL(None).cuGetProcAddress_v2(b"cuInit", ctypes.byref(found), 12000, ctypes.c_uint64(), ctypes.byref(status)):
        sys.exit("the stub did not load the driver")
before = ctypes.CDLL(os.environ["BEFORE"], mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL("libcuda.so.1")
before.before_calls.restype = cuda.sim_calls.restype = ctypes.c_ulong
shimmed = any("libvramshim" in line for line in open("/proc/self/maps"))
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
entries = [b"cuMemFree_v2"] if "BEFORE_FIRST" in os.environ else [b"cuMemAlloc_v2", b"cuMemFree_v2"]


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
_ctypes.dlclose(before._handle)
ok(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(5 << 20)))
ok(cuda.cuMemFree_v2(pointer))
print("the driver's answers are right")
