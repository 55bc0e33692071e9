"""SIGUSR1 takes the memory of PyTorch's and CuPy's own caches back from a program that runs. How fast, as
seen from another process; what it costs a training loop; and that the program goes on as if nothing had been.

What the driver takes for the same frees is measured natively, by the framework's own way of emptying its cache."""
import ctypes
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

from .common import GPU, end_group, environment, execute, has, last_json, log, say, skip, time_left, verdict, why

MARGIN_MS = 20  # from the signal to the memory, beside the driver's own frees
SLACK_MIB = 64
FLUSH = r"vramshim: flush"


class Trouble(Exception):
    """A program did not do what it must."""


class Card:
    """The memory in use on the card: by NVML, or where there is none by nvidia-smi, which takes its time."""

    def __init__(self):
        self.handle = ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle)):
                self.nvml = None
        except (OSError, AttributeError):
            self.nvml = None
        start = time.monotonic()
        for _ in range(10):
            self.used()
        say(f"memory is read by {'NVML' if self.nvml else 'nvidia-smi'}, {(time.monotonic() - start) * 100:.2f} ms each time")

    def used(self):
        """In MiB."""
        if self.nvml:
            memory = (ctypes.c_ulonglong * 3)()  # total, free, used
            if r := self.nvml.nvmlDeviceGetMemoryInfo(self.handle, memory):
                raise Trouble(f"nvmlDeviceGetMemoryInfo: error {r}")
            return memory[2] / (1 << 20)
        r = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
                           stdout=subprocess.PIPE, text=True, timeout=30)
        return float(r.stdout.split()[0])

    def fall(self, floor, since, seconds):
        """How many ms after `since` no more than `floor` was in use; looks each millisecond."""
        while True:
            used, now = self.used(), time.monotonic()
            if used <= floor + SLACK_MIB:
                return (now - since) * 1e3
            if now - since > seconds:
                raise Trouble(f"{used:.0f} MiB in use {seconds} s later; what is live takes {floor:.0f} MiB")
            time.sleep(0.001)


class Program:
    """A program that is talked to; its lines can be waited for."""

    def __init__(self, command, env, out):
        self.name, self.log = " ".join(str(c) for c in command[1:]), out
        self.out, self.err = [], []
        self.changed = threading.Condition()
        self.process = subprocess.Popen([*map(str, command)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, errors="replace", bufsize=1, process_group=0)
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True)
                        for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))]
        for reader in self.readers:
            reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        end_group(self.process)
        for reader in self.readers:
            reader.join(5)
        log(self.log, self.name, "\n".join(self.err))

    def _read(self, stream, lines):
        for line in stream:
            with self.changed:
                lines.append(line.rstrip("\n"))
                self.changed.notify_all()

    def next(self, lines, seen, pattern, seconds):
        """The first line from number `seen` on that fits."""
        def fitting():
            return next((line for line in lines[seen:] if re.search(pattern, line)), None)

        def settled():
            return fitting() or (self.process.poll() is not None and not any(r.is_alive() for r in self.readers))

        end = time.monotonic() + time_left(seconds)
        with self.changed:
            # An end of the program is not notified: look now and then.
            while not settled() and time.monotonic() < end:
                self.changed.wait(0.2)
            line = fitting()
        if line is None:
            state = f"status {self.process.poll()}" if self.process.poll() is not None else f"after {seconds} s"
            raise Trouble(f"no line like {pattern!r}, {state}: {' '.join(self.err)[-300:]}")
        return line

    def signal(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def send(self, line=""):
        try:
            self.process.stdin.write(line + "\n")
        except (BrokenPipeError, ValueError):
            raise Trouble(f"it reads no more, status {self.process.poll()}: {' '.join(self.err)[-300:]}") from None

    def end(self, seconds=60):
        """Its last line as JSON."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            status = self.process.wait(max(1, time_left(seconds)))
        except subprocess.TimeoutExpired:
            raise Trouble(f"did not end within {seconds} s") from None
        for reader in self.readers:
            reader.join(5)
        got = last_json("\n".join(self.out))
        if status or got is None:
            raise Trouble(f"status {status}, last line {self.out[-1:]}: {' '.join(self.err)[-300:]}")
        return got


def held_again(p, number):
    """Waits for the n-th "held"."""
    places = [i for i, line in enumerate(p.out) if line == "held"]
    if len(places) < number:
        p.next(p.out, places[-1] + 1 if places else 0, "^held$", 90)


def flushed(p, seen):
    return re.sub(r"^.*?(?=vramshim:)", "", p.next(p.err, seen, FLUSH, 10))


class Idle:
    """A program that idles with a large cache, and what it holds when its framework empties it."""

    def __init__(self, card, shim, out, framework):
        self.card, self.shim, self.out, self.framework = card, shim, out, framework
        self.mib, self.natively = 8192, None

    def program(self, *arguments):
        return [sys.executable, GPU / "idle.py", self.framework, "--mib", str(self.mib), *arguments]

    def native(self, rounds=3):
        """Milliseconds that the framework takes to empty its cache, the level afterwards, and the result."""
        if not self.natively:
            with Program(self.program("--rounds", str(rounds), "--wait", "0", "--empty"), environment(), self.out) as p:
                levels = []
                for i in range(rounds):
                    held_again(p, i + 1)
                    time.sleep(0.1)
                    levels.append(self.card.used())
                    p.send()
                got = p.end()
            self.natively = got["ms"], max(levels), got["result"]
            say(f"natively {self.framework} empties {self.mib} MiB in {', '.join(f'{ms:.1f}' for ms in got['ms'])} ms; "
                f"{self.natively[1]:.0f} MiB in use then")
        return self.natively

    def hold(self, p, number, floor):
        """Waits until the program idles with its cache, and answers the level."""
        held_again(p, number)
        end = time.monotonic() + 0.5
        while (used := self.card.used()) < floor + self.mib - SLACK_MIB:
            if time.monotonic() > end:
                raise Trouble(f"only {used:.0f} MiB in use, with {self.mib} MiB of cache over {floor:.0f} MiB that are live")
            time.sleep(0.001)
        return used

    def signalled(self):
        """In time.sleep(): from the signal to the memory."""
        name = f"SIGUSR1 takes {self.framework}'s cache back"
        empty, floor, result = self.native()
        falls = []
        with Program(self.program("--rounds", str(len(empty)), "--wait", "3"), environment(self.shim), self.out) as p:
            for i in range(len(empty)):
                before = self.hold(p, i + 1, floor)
                time.sleep(0.2)
                seen, start = len(p.err), time.monotonic()
                p.signal()
                falls.append(self.card.fall(floor, start, 2))
                say(f"{before:.0f} MiB before; {flushed(p, seen)}")
            got = p.end()
        took, bound = statistics.median(falls), MARGIN_MS + statistics.median(empty)
        verdict(took <= bound, name, f"{', '.join(f'{ms:.1f}' for ms in falls)} ms after the signal, bound {bound:.1f} ms, of which "
                f"the driver's frees take {statistics.median(empty):.1f} ms natively")
        verdict(got["result"] == result, f"{self.framework} goes on with the same result", "" if got["result"] == result else
                f"{got['result']} and not {result}")

    def by_itself(self, seconds=2):
        """VRAMSHIM_IDLE_DRAIN, twice: it takes its memory again between."""
        _, floor, result = self.native()
        env = environment(self.shim, VRAMSHIM_IDLE_DRAIN=str(seconds))
        falls = []
        with Program(self.program("--rounds", str(len(self.natively[0])), "--wait", "0"), env, self.out) as p:
            for i in range(len(self.natively[0])):
                seen = len(p.err)
                self.hold(p, i + 1, floor)
                start = time.monotonic()
                falls.append(self.card.fall(floor, start, 3 * seconds) / 1e3)
                say(flushed(p, seen))
                p.send()
            got = p.end()
        # It looks four times in that time, and each launch and call about memory begins it anew.
        verdict(all(0.7 * seconds <= f <= 1.5 * seconds + 0.5 for f in falls),
                f"an idle {self.framework} gives its cache back by itself",
                f"after {', '.join(f'{f:.2f}' for f in falls)} s, asked for {seconds}")
        verdict(got["result"] == result, f"{self.framework} takes its memory again, same result")


def notebook(card, shim, out):
    """A Python that is fed by a pipe, as a notebook's kernel is, and idles between two cells."""
    cells = (GPU / "notebook_cells.py").read_text().split("# %%\n")[1:]

    def session(env, between):
        with Program([sys.executable, "-i", "-q"], env, out) as p:
            p.send(cells[0])
            held_again(p, 1)
            time.sleep(0.3)
            value = between(p)
            p.send(cells[1])
            p.next(p.out, 0, '"result"', 60)
            return value, p.end()["result"]

    def emptied(p):
        p.send('torch.cuda.empty_cache(); print("emptied", flush=True)')
        p.next(p.out, 0, "^emptied$", 30)
        time.sleep(0.1)
        return card.used()

    def signalled(p):
        seen, before, start = len(p.err), card.used(), time.monotonic()
        p.signal()
        took = card.fall(floor, start, 2)
        say(flushed(p, seen))
        return before, took

    floor, native = session(environment(), emptied)
    (before, took), result = session(environment(shim), signalled)
    verdict(before > floor + 1900 and result == native, "an idle notebook gives its cache back and goes on with the same result",
            f"from {before:.0f} to {floor:.0f} MiB in {took:.1f} ms" + ("" if result == native else f"; {result} and not {native}"))


def training(card, shim, out, seconds, every=0.3):
    """A training loop that is signalled all the time."""
    program, limit = [sys.executable, GPU / "torch_train.py"], 3 * seconds + 120

    def undisturbed(*arguments):
        outcome = execute([*program, *arguments], environment(), limit)
        log(out, " ".join(map(str, arguments)), outcome.err)
        got = last_json(outcome.out)
        if outcome.status != 0 or not got:
            raise Trouble(f"natively: {why(outcome) or 'no line of JSON'}")
        return got

    native = undisturbed("--seconds", str(seconds))
    steps = str(native["steps"])
    emptied = undisturbed("--steps", steps, "--empty-every", str(every))
    sent = 0
    with Program([*program, "--steps", steps], environment(shim), out) as p:
        p.next(p.out, 0, "^training$", 90)
        end = time.monotonic() + time_left(limit)
        while p.process.poll() is None and not p.out[-1].startswith("{") and time.monotonic() < end:
            p.signal()
            sent += 1
            time.sleep(every)
        signalled = p.end()
        lines = [line for line in p.err if re.search(FLUSH, line)]
    for name, got in (("natively", native), (f"natively, empty_cache() each {every} s", emptied),
                      (f"signalled {sent} times", signalled)):
        ms = sorted(got["ms"])
        say(f"{name}: {len(ms)} steps, median {statistics.median(ms):.2f} ms, 99 of 100 below {ms[len(ms) * 99 // 100]:.2f} ms, "
            f"slowest {', '.join(f'{t:.2f}' for t in ms[:-4:-1])} ms")
    if times := emptied["emptied"]:
        say(f"one empty_cache() natively: median {statistics.median(times):.2f} ms, slowest {max(times):.2f} ms")
    drained = sum("gave up" in line for line in lines)
    say(f"{len(lines)} flushes, {drained} of them with torch's cache; the last: {lines[-1] if lines else 'none'}")
    same = native["result"] == emptied["result"] == signalled["result"]
    verdict(same and drained, f"a training loop signalled each {every} s for {seconds:g} s has the same losses",
            f"{steps} steps, {signalled['result'][0]}" if same else
            f"natively {native['result']}, emptied {emptied['result']}, signalled {signalled['result']}")
    cost = max(emptied["ms"]) - statistics.median(native["ms"])
    bound = max(native["ms"]) + cost
    over = sum(ms > bound for ms in signalled["ms"])
    verdict(over == 0, "no step is slower than the slowest one and a drain",
            f"{f'{over} are: ' if over else ''}slowest {max(signalled['ms']):.2f} ms, bound {bound:.2f} ms (slowest natively "
            f"{max(native['ms']):.2f}, a drain and taking the memory again {cost:.2f})")


def attempt(name, check, *arguments, **options):
    """Whatever goes wrong in one check, the next one is made."""
    if time_left(10) < 10:
        skip(name, "no time left")
        return
    try:
        check(*arguments, **options)
    except (Trouble, OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as e:
        verdict(False, name, f"{'' if isinstance(e, Trouble) else type(e).__name__ + ': '}{e}")


def drain(shim, out, seconds):
    try:
        card = Card()
    except (Trouble, OSError, ValueError, IndexError, subprocess.SubprocessError) as e:
        verdict(False, "drain", f"the memory in use cannot be read: {e}")
        return
    for framework in ("torch", "cupy"):
        if not has(framework):
            skip(f"SIGUSR1 and {framework}'s cache", "not installed")
            continue
        idle = Idle(card, shim, out, framework)
        attempt(f"SIGUSR1 takes {framework}'s cache back", idle.signalled)
        if framework == "torch":
            attempt("VRAMSHIM_IDLE_DRAIN", idle.by_itself)
            attempt("an idle notebook", notebook, card, shim, out)
    if has("torch"):
        attempt("a training loop", training, card, shim, out, seconds)
