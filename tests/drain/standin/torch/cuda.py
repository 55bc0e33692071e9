import time

import gpu

cache = []  # (address, size) of what the program gave back
calls = 0
delay = 0  # seconds that emptying takes, without the GIL
failure = None


def keep(count, size):
    """A program's tensors, dropped: the cache has their memory now."""
    cache.extend([(gpu.allocate(size), size) for _ in range(count)])


def is_initialized():
    return bool(gpu.primary)


def device_count():
    return 1


def memory_reserved(device):
    return sum(size for _, size in cache)


def empty_cache():
    global calls
    calls += 1
    if failure:
        raise failure
    if delay:
        time.sleep(delay)
    while cache:
        gpu.free(cache.pop()[0])
