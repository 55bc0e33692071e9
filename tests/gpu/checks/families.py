"""Families of memory beside cuMemAlloc: what the caches of virtual and of pinned memory are worth, whether what the signal
names adds up to what the driver says, and real programs of each family, same results."""
import concurrent.futures
import re
import statistics
import sys

from .common import GPU, environment, execute, has, last_json, log, run, say, skip, verdict, why
from .drain import FLUSH, Trouble, attempt, Program, held_again

PLATFORM = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# XLA chooses among kernels by timing them, and so rounds differently from run to run.
STEADY = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"}
CACHES = {"VRAMSHIM_VIRTUAL_CACHE": "8G", "VRAMSHIM_HOST_CACHE": "1G"}
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def jax_platform(build, shim, out, rounds):
    """JAX that creates, maps and releases memory for each buffer: beside its pool, beside the floor."""
    floor, program = build / "tests/programs/libvmm_floor.so", [GPU / "jax_buffers.py"]
    variants = {
        "default": environment(**STEADY),
        "platform": environment(**STEADY, **PLATFORM),
        "floor": environment(floor, **STEADY, **PLATFORM),
        "shim": environment(shim, out, **STEADY, **PLATFORM, VRAMSHIM_VIRTUAL_CACHE="8G"),
    }
    medians, results = {(name, part): [] for name in variants for part in ("jit", "eager")}, set()
    for i in range(rounds):
        # Each round begins elsewhere: none is always the first.
        for name in [*variants][i % len(variants):] + [*variants][:i % len(variants)]:
            got = run(program, variants[name], out)
            if not got:
                raise Trouble(f"{name} did not run")
            results.add(str(got["result"]))
            for part in ("jit", "eager"):
                medians[name, part].append(statistics.median(got[part]))
    verdict(len(results) == 1, "JAX in each setting has the same result", f"{rounds} rounds" if len(results) == 1 else str(results))
    for part in ("jit", "eager"):
        def ratio(a, b):
            ratios = sorted(x / y for x, y in zip(medians[a, part], medians[b, part]))
            return statistics.median(ratios), f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"

        say(f"JAX {part}: " + ", ".join(f"{name} {statistics.median(medians[name, part]):.4f} ms" for name in variants) +
            f"; platform / default {ratio('platform', 'default')[1]}, shim / default {ratio('shim', 'default')[1]}, "
            f"floor / default {ratio('floor', 'default')[1]}, platform / shim {ratio('platform', 'shim')[1]}")
        value, words = ratio("shim", "floor")
        verdict(value <= 1.05, f"JAX's platform allocator, {part}: shim / floor", f"{words}, must be <= 1.05")


def host_buffers(build, shim, out, rounds):
    """Pinned memory for each transfer."""
    program = build / "tests/programs/host_loop"
    if not program.exists():
        return skip("pinned memory", "the build has no tests/programs/host_loop")
    for name, size, count in (("4 KiB", 4 << 10, 200), ("256 KiB", 256 << 10, 200), ("16 MiB", 16 << 20, 60)):
        times, results = {"native": [], "shim": []}, set()
        for _ in range(rounds):
            for variant, env in (("native", environment()), ("shim", environment(shim, out, VRAMSHIM_HOST_CACHE="1G"))):
                outcome = execute([program, size, count], env)
                log(out, f"host_loop {size}, {variant}", outcome.err)
                got = last_json(outcome.out)
                if outcome.status != 0 or not got:
                    raise Trouble(f"{variant}: {why(outcome)}")
                results.add(got["result"])
                times[variant].append(statistics.median(got["ms"]))
        ratios = sorted(a / b for a, b in zip(times["native"], times["shim"]))
        value = statistics.median(ratios)
        verdict(value >= 10 and len(results) == 1, f"pinned memory of {name} for each transfer: without / with the shim",
                f"{value:.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}), {statistics.median(times['native']):.3f} and "
                f"{statistics.median(times['shim']):.4f} ms a round, must be >= 10")


def size_of(words):
    number, unit = words.split()
    return float(number) * UNITS[unit]


def named(shim, out, title, framework, **env):
    """Of what the driver says is in use, the part that has a name."""
    with Program([sys.executable, GPU / "live.py", framework], environment(shim, **STEADY, **env), out) as p:
        held_again(p, 1)
        p.signal()
        p.next(p.err, 0, FLUSH, 10)
        line = p.next(p.err, 0, r"vramshim: device 0:", 10)
        p.send()
        result = p.end()["result"]
    say(line)
    used = size_of(re.search(r"device 0: ([\d.]+ \w+) of", line)[1])
    rest = re.search(r"([\d.]+ \w+) since then", line)
    rest = size_of(rest[1]) if rest else 0
    verdict(rest <= 0.02 * used, f"what has a name is what is in use, {title}", f"{100 * (1 - rest / used):.2f}% of it")
    return result


PROGRAMS = [
    ("torch, expandable_segments", "torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("torch, backend:cudaMallocAsync", "torch", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    ("torch, its cache off", "torch", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    ("JAX, default", "jax", STEADY | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}),
    ("JAX, platform", "jax", STEADY | PLATFORM),
    ("JAX, cuda_async", "jax", STEADY | {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}),
    ("CuPy, its async pool", "cupy-async", {}),
    ("CuPy, managed memory", "cupy-managed", {}),
]


def same_results(shim, out):
    """Only results are compared: several programs run at once."""
    with concurrent.futures.ThreadPoolExecutor(6) as lanes:
        def submitted(program, env):
            return lanes.submit(run, [GPU / "family.py", program], env, out)

        runs = []
        for title, program, more in PROGRAMS:
            if not has(program.split("-")[0]):
                skip(title, "not installed")
                continue
            runs.append((title, [(name, submitted(program, environment(s, s and out, **more, **options))) for name, s, options in (
                ("natively", None, {}), ("shim", shim, {}), ("its caches on", shim, CACHES),
                ("its caches on, ordered", shim, CACHES | {"VRAMSHIM_FREE": "ordered"}))]))
        for title, variants in runs:
            (_, native), *others = [(name, future.result()) for name, future in variants]
            if not native:
                skip(title, "does not run natively")
                continue
            for name, got in others:
                same = bool(got) and got["result"] == native["result"]
                verdict(same, f"{title}: {name}", "the same result" if same else f"{got} and not {native}")


def families(build, shim, out, rounds):
    if has("jax"):
        attempt("JAX's platform allocator", jax_platform, build, shim, out, rounds)
    else:
        skip("JAX's platform allocator", "JAX is not installed")
    attempt("pinned memory", host_buffers, build, shim, out, rounds)
    for title, framework, env in (("torch", "torch", {}), ("JAX, default", "jax", {}), ("JAX, platform", "jax", PLATFORM),
                                  ("JAX, platform, kept", "jax", PLATFORM | CACHES)):
        if has(framework):
            attempt(f"names, {title}", named, shim, out, title, framework, **env)
    attempt("real programs", same_results, shim, out)
