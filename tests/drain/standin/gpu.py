"""The driver by ctypes, as much of it as the stand-ins for torch and CuPy need. Knows nothing of the shim."""
import ctypes

_driver = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
primary, stream = ctypes.c_void_p(), ctypes.c_void_p()


def call(name, *args):
    result = getattr(_driver, name)(*args)
    if result:
        raise RuntimeError(f"{name}: error {result}")


def start():
    if not primary:
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), 0)
    call("cuCtxSetCurrent", primary)


def allocate(size):
    start()
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def free(address):
    start()
    call("cuMemFree_v2", ctypes.c_uint64(address))


def used():
    """Bytes that the (simulated) driver has given away."""
    _driver.sim_used.restype = ctypes.c_uint64
    return _driver.sim_used(0)


def begin_capture():
    start()
    if not stream:
        call("cuStreamCreate", ctypes.byref(stream), 1)
    call("cuStreamBeginCapture_v2", stream, 0)


def end_capture():
    graph = ctypes.c_void_p()
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    call("cuGraphDestroy", graph)
