"""Law 31 on the GPU host: the tools that get between a program and the driver by themselves, and what frameworks do beyond
plain allocation. Each program runs natively and under the shim, and all runs must say the same.

Only results are compared here, no times, so several programs run at once. What does not work natively is skipped: it can say
nothing of the shim."""
import collections
import concurrent.futures
import glob
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from .common import GPU, environment, execute, has, last_json, log, say, skip, verdict, why

MODES = ("sync", "fenced", "ordered")
CACHE_OFF = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor is then a call of the shim

# value: what must be the same, None where there is none; unusable: why the run says nothing; served: allocations that the
# shim counted; note: for the reader.
Run = collections.namedtuple("Run", "value unusable served note outcome")


def allocations(folder):
    """How many allocations the reports of all processes of a run speak of."""
    texts = [p.read_text(errors="replace") for p in folder.glob("report*")]
    return sum(int(n) for text in texts for n in re.findall(r"served from the cache +\d+ of (\d+)", text))


# What to compare of a run: each reader answers (value, why it is unusable, a note).

def json_line(outcome, folder):
    lines = [line for line in outcome.out.splitlines() if line.startswith("{")]
    value = last_json(lines[-1]) if lines else None
    if value is None:
        return None, "no line of JSON", ""
    if "skip" in value:
        return None, value["skip"], ""
    if "kernels" not in value:
        return value, "", ""
    return value, "" if value["kernels"] else "the profiler saw no kernel", f"{value['kernels']} kernels"


def words(pattern):
    def read(outcome, folder):
        found = re.search(pattern, outcome.out)
        return (found[0], "", "") if found else (None, f"it did not print {pattern!r}", "")
    return read


def memcheck(program):
    """What the program says, and how many errors the sanitizer counted."""
    def read(outcome, folder):
        text = outcome.out + outcome.err
        found = re.findall(r"ERROR SUMMARY: (\d+) error", text)
        if not found:
            said = [line for line in text.splitlines() if line.startswith("====") and re.search("[a-z]", line)]
            return None, "no summary of errors" + (f": {said[-1].strip('= ')}" if said else ""), ""
        value, unusable, _ = program(outcome, folder)
        errors = sum(map(int, found))
        return (value, errors), unusable, f"{errors} errors"
    return read


def profiled(program):
    """What the program says, and which kernels Nsight Compute measured."""
    def read(outcome, folder):
        text = outcome.out + outcome.err
        if "ERR_NVGPUCTRPERM" in text:
            return None, "the performance counters may not be read here (ERR_NVGPUCTRPERM)", ""
        kernels = re.findall(r"^ +(\S.*?) \(\d+, \d+, \d+\)x\(", text, re.MULTILINE)
        if not kernels:
            said = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
            return None, "no kernel measured" + (f": {said[0]}" if said else ""), ""
        value, unusable, _ = program(outcome, folder)
        return (value, kernels), unusable, f"{len(kernels)} kernels measured"
    return read


def counted(program):
    """What the program says, and how many kernels a library injected by CUPTI saw."""
    def read(outcome, folder):
        text = (folder / "cupti.json").read_text() if (folder / "cupti.json").exists() else ""
        counts = last_json(text)
        if not counts:
            return None, f"CUPTI was not injected{': ' + text.strip() if text.strip() else ''}", ""
        value, unusable, _ = program(outcome, folder)
        # The allocations and all calls differ by what the shim saves and adds; the program's kernels do not.
        return (value, counts["launches"], counts["kernels"]), unusable if counts["kernels"] else "CUPTI saw no kernel", \
            f"CUPTI saw {counts['kernels']} kernels, {counts['allocations']} cuMemAlloc"
    return read


class Company:
    """Runs the programs of all checks in a few lanes at once; the judging is done in order, afterwards."""

    def __init__(self, shim, out, folder, lanes):
        self.shim, self.out, self.folder, self.lanes = shim, out, folder, lanes
        self.judges, self.alone = [], threading.Lock()
        self.unseen = set()  # the names of programs that may keep the shim from seeing the driver

    def _run(self, name, mode, command, read, limit, env, alone):
        folder = self.folder / re.sub(r"\W+", "-", name) / mode
        folder.mkdir(parents=True)
        # Caches of compilers and the like begin empty in each run. The path is short: sockets lie in it.
        env = environment(self.shim if mode != "natively" else None, folder, TMPDIR=str(folder), **env)
        if mode in MODES[1:]:
            env["VRAMSHIM_FREE"] = mode
        with self.alone if alone else threading.Lock():
            outcome = execute(command, env, limit, folder)
        log(self.out, f"{name}, {mode}: {why(outcome) or 'status 0'}, {outcome.seconds:.1f} s",
            outcome.err + ("" if outcome.status == 0 else outcome.out))
        value, unusable, note = (None, why(outcome), "") if outcome.limit == 0 or outcome.status is None else read(outcome, folder)
        said = [line for line in outcome.err.splitlines() if "vramshim:" in line]
        if outcome.status:
            unusable = "; ".join(filter(None, [unusable, why(outcome)]))
        return Run(value, unusable, allocations(folder), ", ".join(filter(None, [note, *said[:1]])), outcome)

    def alike(self, name, command, read=json_line, modes=MODES, limit=120, alone=False, judge=None, **env):
        runs = {mode: self.lanes.submit(self._run, name, mode, command, read, limit, env, alone) for mode in ("natively", *modes)}
        self.judges.append((name, lambda: (judge or self._judge)(name, {mode: run.result() for mode, run in runs.items()})))

    def _judge(self, name, runs):
        native = runs.pop("natively")
        if native.unusable:
            same = all(run.unusable.split(":")[0] == native.unusable.split(":")[0] for run in runs.values())
            skip(name, f"natively: {native.unusable}" + ("" if same else "; otherwise under the shim: " + "; ".join(
                f"{mode}: {run.unusable or 'it works'}" for mode, run in runs.items())))
            return
        for mode, run in runs.items():
            title = f"{name}, {mode}"
            if run.outcome.limit == 0:
                skip(title, run.unusable)
            elif run.unusable:
                verdict(False, title, run.unusable)
            elif run.value != native.value:
                verdict(False, title, f"{run.value} and not {native.value}")
            elif not run.served and name not in self.unseen:
                verdict(False, title, "the shim was not at work")
            else:
                verdict(True, title, ", ".join(filter(None, [run.note, f"{run.served or 'no'} allocations through the shim"])))
        if native.note and native.note != runs[MODES[0]].note:
            say(f"natively: {native.note}")

    def judge_end(self, name, runs):
        """A program whose main thread has ended ends with its last thread, where the driver's own threads let it."""
        native = runs.pop("natively")
        for mode, run in runs.items():
            said = "; natively ".join(f"{why(o) or 'status 0'} after {o.seconds:.1f} s" for o in (run.outcome, native.outcome))
            if native.outcome.status != 0 or run.outcome.limit == 0:
                skip(f"{name}, {mode}", said)
            else:
                verdict(run.outcome.status == 0 and run.outcome.out == native.outcome.out and
                        run.outcome.seconds < native.outcome.seconds + 2, f"{name}, {mode}", said)


def tool(name):
    """A tool of the toolkit, on the path or where its packages put it."""
    places = ["/usr/local/cuda*/bin/", "/usr/local/cuda*/compute-sanitizer/", "/opt/nvidia/nsight-compute/*/"]
    return shutil.which(name) or next(iter(sorted(sum((glob.glob(p + name) for p in places), []), reverse=True)), None)


def cupti_library():
    """The one that torch brings along, or the toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    places = [*(spec.submodule_search_locations if spec else []), "/usr/local/cuda/lib64", "/usr/local/cuda/extras/CUPTI/lib64"]
    return next((p for place in places for p in sorted(map(str, Path(place).glob("**/libcupti.so.*")))), None)


def driver_programs(build):
    """Small programs of the driver alone: name, command, what to compare."""
    programs = build / "tests/programs"
    return [("loop", [programs / "loop", "--iterations", "20", "--size", "1M", "--blocks", "8", "--quiet"], words(r"checksum \w+")),
            ("overwrite", [programs / "overwrite", "10"], words(r"10 rounds, 0 wrong"))]


def with_tools(all_of, build, torch):
    small = [("torch", [sys.executable, GPU / "torch_small.py"], json_line)] if torch else []
    programs = driver_programs(build) + small
    if sanitizer := tool("compute-sanitizer"):
        for name, command, read in programs:
            all_of.alike(f"compute-sanitizer memcheck, {name}",
                         [sanitizer, "--tool", "memcheck", "--target-processes", "all", *command], memcheck(read), limit=240,
                         **CACHE_OFF)
    else:
        skip("compute-sanitizer", "not found")
    if ncu := tool("ncu"):
        for name, command, read in programs[1:]:
            all_of.unseen.add(f"ncu, {name}")  # it stands in the driver's place itself, so that the shim leaves it alone (law 2)
            all_of.alike(f"ncu, {name}", [ncu, "--target-processes", "all", "--clock-control", "none", "--launch-count", "5",
                                          "--metrics", "gpu__time_duration.sum", *command],
                         profiled(read), alone=True, **CACHE_OFF)  # the counters are one program's at a time
    else:
        skip("ncu", "not found")
    injected, library = build / "tests/programs/libcupti_counts.so", cupti_library()
    if not library or not injected.exists():
        skip("CUPTI by injection", "no libcupti found" if not library else f"the build has no {injected.name}")
    else:
        for name, command, read in programs[1:]:
            all_of.alike(f"CUPTI by injection, {name}", command, counted(read), CUDA_INJECTION64_PATH=str(injected),
                         CUPTI_COUNTS_LIBRARY=library, CUPTI_COUNTS_FILE="cupti.json", **CACHE_OFF)


def with_torch(all_of):
    def program(name, *arguments):
        return [sys.executable, GPU / f"torch_{name}.py", *arguments]

    all_of.alike("torch.compile, reduce-overhead", program("compile"), modes=("sync", "ordered"), TORCHINDUCTOR_COMPILE_THREADS="1")
    all_of.alike("torch.profiler", program("profile"), **CACHE_OFF)
    all_of.alike("NCCL on one GPU", program("nccl"), modes=("sync",))
    all_of.alike("NCCL on one GPU, torch's cache off", program("nccl"), **CACHE_OFF)
    all_of.alike("torch.cuda.graph", program("graph"))
    all_of.alike("torch.multiprocessing", program("share"))
    all_of.alike("torch.multiprocessing, torch's cache off", program("share"), **CACHE_OFF)
    for start in ("fork", "spawn"):
        all_of.alike(f"DataLoader, {start}", program("loader", start), **CACHE_OFF)


def company(build, shim, out):
    """Everything, in at most half the processors' number of lanes."""
    lanes = max(2, min(6, (os.cpu_count() or 2) // 2))
    torch = has("torch")
    if not torch:
        skip("company with torch", "torch is not installed")
    missing = [p for _, (p, *_), _ in driver_programs(build) if not p.exists()]
    if missing:
        verdict(False, "company", f"the build has no {missing[0].name}")
        return
    with tempfile.TemporaryDirectory(prefix="vramshim-") as folder, concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        all_of = Company(shim, out, Path(folder), pool)
        if torch:
            all_of.alike("torch, its cache off", [sys.executable, GPU / "torch_small.py"], modes=MODES, **CACHE_OFF)
        with_tools(all_of, build, torch)
        if torch:
            with_torch(all_of)
        gone = build / "tests/programs/main_gone"
        if gone.exists():
            all_of.alike("the main thread ends first", [gone], words("the last thread ends"), limit=10, judge=all_of.judge_end)
        else:
            skip("the main thread ends first", "the build has no tests/programs/main_gone")
        for name, judge in all_of.judges:
            try:
                judge()
            except Exception as e:  # of whatever kind: the next check is judged all the same
                verdict(False, name, f"{type(e).__name__}: {e}")
