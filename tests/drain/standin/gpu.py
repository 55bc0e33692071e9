"""The driver by ctypes, as much of it as the stand-ins for torch and CuPy need. Knows nothing of the shim."""
import ctypes
import time

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


def launch_for(seconds, entry):
    """A launch each 50 ms, and nothing else."""
    start()
    module, function, execution = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), b".version 7.0")
    call("cuModuleGetFunction", ctypes.byref(function), module, b"nothing")
    args = [function, 1, 1, 1, 1, 1, 1, 0, None, None, None]
    if entry == "cuGraphLaunch":
        begin_capture()
        graph = end_capture(keep=True)
        call("cuGraphInstantiateWithFlags", ctypes.byref(execution), graph, ctypes.c_uint64(0))
        args = [execution, stream]
    elif "Cooperative" in entry:
        args.pop()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call(entry, *args)
        time.sleep(0.05)


def begin_capture():
    start()
    if not stream:
        call("cuStreamCreate", ctypes.byref(stream), 1)
    call("cuStreamBeginCapture_v2", stream, 0)


def end_capture(keep=False):
    graph = ctypes.c_void_p()
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    if keep:
        return graph
    call("cuGraphDestroy", graph)
