"""What the checks on a machine with a GPU share: a program with a time limit, its environment, and what is said of it."""
import collections
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
GPU = ROOT / "tests/gpu"
TIMEOUT = 120

passed, failed, skipped = [], [], []
writing = threading.Lock()  # the log is written by all lanes
until = None  # what has not begun by then does not begin; scripts/gpu-check --limit


def verdict(ok, name, detail=""):
    (passed if ok else failed).append(name)
    print(f"{'ok  ' if ok else 'FAIL'} {name}{': ' + detail if detail else ''}", flush=True)


def skip(name, why):
    skipped.append(name)
    print(f"skip {name}: {why}", flush=True)


def say(text):
    print("     " + text, flush=True)


def environment(shim=None, out=None, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("VRAMSHIM_")}
    env.update(CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONDONTWRITEBYTECODE="1", **more)
    if shim:
        env["LD_PRELOAD"] = ":".join(filter(None, [str(shim), env.get("LD_PRELOAD")]))
        env["VRAMSHIM_REPORT"] = str(out / "report.%p") if out else "none"
    return env


def has(module):
    return importlib.util.find_spec(module) is not None


def time_left(limit):
    """The limit, or less where the whole run has less."""
    return limit if until is None else max(0, min(limit, until - time.monotonic()))


def end_group(process):
    """The program and what it started; those of its children that live on keep its pipes open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        say(f"process {process.pid} cannot be ended")


# status: None where it did not end in time; limit 0 where it did not even begin.
Outcome = collections.namedtuple("Outcome", "status out err seconds limit")


def execute(command, env, limit=TIMEOUT, cwd=None):
    """Runs a program to its end or to the limit, whatever its children do."""
    limit = time_left(limit)
    if limit < 1:
        return Outcome(None, "", "", 0, 0)
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        start = time.monotonic()
        try:
            process = subprocess.Popen([*map(str, command)], env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                       process_group=0)
        except OSError as e:
            return Outcome(127, "", str(e), 0, limit)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            seconds = time.monotonic() - start
            end_group(process)
        out.seek(0)
        err.seek(0)
        return Outcome(status, out.read(), err.read(), seconds, limit)


def why(outcome):
    """What went wrong, in a few words; empty if nothing did."""
    if outcome.limit == 0:
        return "no time left"
    if outcome.status is None:
        return f"did not end within {outcome.limit:.0f} s"
    if outcome.status:
        last = (outcome.err.strip() or outcome.out.strip())[-300:]
        return f"status {outcome.status}" + (f": {last}" if last else "")
    return ""


def log(out, title, text):
    with writing, open(out / "stderr.log", "a") as f:
        f.write(f"== {title}\n{text}\n")


def last_json(text):
    """The last line as JSON, or None."""
    try:
        return json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return None


def run(program, env, out):
    """The JSON line of a workload, or None with the reason printed."""
    outcome = execute([sys.executable, *program], env)
    log(out, " ".join(map(str, program)), outcome.err)
    got = last_json(outcome.out) if outcome.status == 0 else None
    if got is None:
        say(f"{program[0].name}: {why(outcome) or 'no line of JSON'}")
    return got
