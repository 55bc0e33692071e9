#!/usr/bin/python3
"""Draining the caches of torch and CuPy from outside, with stand-ins for both that hold memory of the simulated driver.

    test_drain.py SHIM EMBEDDED [unittest's options]     LD_LIBRARY_PATH finds the simulated driver
"""
import os, pathlib, queue, re, signal, subprocess, sys, sysconfig, threading, time, unittest

SHIM, EMBEDDED = sys.argv[1:3]
HERE = pathlib.Path(__file__).parent
PATIENCE = 60  # seconds until something that must come counts as missing

programs = []  # all that were started: none outlives the tests


def tearDownModule():
    for process in programs:
        process.kill()


START = """
import ctypes, os, signal, sys, threading, time
import gpu, torch, cupy
torch.cuda.keep(8, 64 * gpu.MIB)
live = gpu.allocate(16 * gpu.MIB)
def say(*words):
    print(*words, flush=True)
"""
READY = "say('ready')\n"
# Where Python lets us in late (a loaded machine), the block that the program had freed by itself has gone back before.
GAVE = (r"flush \(SIGUSR1\): torch gave up 512\.0 MiB \(Python let us in after [^)]*\); "
        r"gave (8 blocks \(512\.0 MiB\)|7 blocks \(448\.0 MiB\)) back")


class Program:
    """A program under the shim; its lines can be waited for."""

    def __init__(self, code, command=None, **environment):
        env = dict(os.environ, LD_PRELOAD=SHIM, PYTHONPATH=str(HERE / "standin"), VRAMSHIM_REPORT="none",
                   PYTHONDONTWRITEBYTECODE="1", **environment)
        self.process = subprocess.Popen(command or [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        programs.append(self.process)
        self.out, self.err = [], []
        self.queues = {}
        self.readers = []
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            self.queues[id(lines)] = queue.Queue()
            reader = threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, stream, lines):
        for line in stream:
            lines.append(line.rstrip("\n"))
            self.queues[id(lines)].put(line)
        self.queues[id(lines)].put(None)

    def _wait(self, lines, pattern):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self.queues[id(lines)].get(timeout=max(0, end - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line like {pattern}; said {self.err}, printed {self.out}")
            if re.search(pattern, line):
                return line

    def prints(self, pattern):
        return self._wait(self.out, pattern)

    def says(self, pattern):
        return self._wait(self.err, pattern)

    def signal(self):
        os.kill(self.process.pid, signal.SIGUSR1)

    def send(self, line=""):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        """The exit status, once everything is read."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        status = self.process.wait(PATIENCE)
        for reader in self.readers:
            reader.join(PATIENCE)
        self.process.stdout.close()
        self.process.stderr.close()
        return status


class Idle(unittest.TestCase):
    def drained_while(self, idle, then=""):
        """The program idles in its own way until a line comes in."""
        p = Program(START + READY + idle + "\nsay('calls', torch.cuda.calls, 'used', gpu.used() // gpu.MIB)\n" + then)
        p.prints("ready")
        p.signal()
        p.says(GAVE)
        p.send()
        p.prints("calls 1 used 16")
        self.assertEqual(p.end(), 0, p.err)
        return p

    def test_input(self):
        self.drained_while("input()")

    def test_sleep(self):
        self.drained_while("time.sleep(2)\ninput()")

    def test_blocking_recv(self):
        self.drained_while("import socket\na, b = socket.socketpair()\n"
                           "threading.Thread(target=lambda: (input(), b.send(b'x')), daemon=True).start()\na.recv(1)")

    def test_lock(self):
        self.drained_while("e = threading.Event()\nthreading.Thread(target=lambda: (input(), e.set()), daemon=True).start()\n"
                           "e.wait()")

    def test_another_interpreter(self):
        self.drained_while("import _xxsubinterpreters as interpreters\ni = interpreters.create()\n"
                           "code = 'import time\\nend = time.monotonic() + 1.5\\nwhile time.monotonic() < end: pass'\n"
                           "threading.Thread(target=interpreters.run_string, args=(i, code), daemon=True).start()\ninput()\n"
                           "time.sleep(2)")


class Busy(unittest.TestCase):
    def test_a_call_that_keeps_the_lock(self):
        """What was freed goes at once, the frameworks' caches when Python lets us in; CUDA calls of the program do not wait."""
        p = Program(START + "gpu.free(live)\n" + READY + "input()\n"
                    "ctypes.PyDLL(None).system(b'echo asleep; sleep 1.5')\nsay('awake')\ninput()\nsay('used', gpu.used())\n")
        p.prints("ready")
        p.send()
        p.prints("asleep")
        p.signal()
        p.says(r"gave 1 block \(16\.0 MiB\) back .*; Python is busy, its frameworks' caches follow when it lets us in")
        p.says(GAVE)
        p.send()
        p.prints("used 0")
        self.assertEqual(p.end(), 0, p.err)
        self.assertEqual(sum("flush" in line for line in p.err), 2, p.err)

    def test_a_loop_at_full_speed(self):
        p = Program(START + READY + "n = 0\nfor i in range(3000000):\n    n = (n * 31 + i) % 1000003\n"
                    "    if i % 100000 == 0: torch.cuda.keep(1, gpu.MIB)\nsay('n', n)\n")
        p.prints("ready")
        for _ in range(10):
            p.signal()
            time.sleep(0.05)
        n = 0
        for i in range(3000000):
            n = (n * 31 + i) % 1000003
        p.prints(f"n {n}$")
        self.assertEqual(p.end(), 0, p.err)
        self.assertTrue(any("torch gave up" in line for line in p.err), p.err)

    def test_a_storm(self):
        p = Program(START + READY + "input()\nsay('used', gpu.used() // gpu.MIB)\n")
        p.prints("ready")
        for _ in range(1000):
            p.signal()
        p.says(GAVE)
        time.sleep(0.3)
        p.send()
        p.prints("used 16")
        self.assertEqual(p.end(), 0, p.err)

    def test_threads_that_allocate(self):
        p = Program(START + """
def work():
    for i in range(3000):
        gpu.free(gpu.allocate((1 + i % 7) * gpu.MIB))
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
""" + READY + "for t in threads: t.join()\nsay('done')\n")
        p.prints("ready")
        while p.process.poll() is None and "done" not in p.out:
            p.signal()
            time.sleep(0.01)
        self.assertEqual(p.end(), 0, p.err)
        self.assertIn("done", p.out)


class Frameworks(unittest.TestCase):
    def test_both(self):
        p = Program(START + "cupy.get_default_memory_pool().keep(4, 32 * gpu.MIB)\n"
                    "cupy.get_default_pinned_memory_pool().keep(1, gpu.MIB)\n" + READY +
                    "input()\nsay('frees', cupy._pool.frees, cupy._pinned.frees, 'used', gpu.used() // gpu.MIB)\n")
        p.prints("ready")
        p.signal()
        p.says(r"torch gave up 512\.0 MiB, CuPy 128\.0 MiB \(")
        p.send()
        p.prints("frees 1 1 used 16")
        self.assertEqual(p.end(), 0, p.err)

    def test_not_imported(self):
        """Nothing is imported for it, and nobody speaks of frameworks."""
        p = Program("import gpu\np = gpu.allocate(gpu.MIB * 4)\ngpu.free(p)\nimport sys\nbefore = set(sys.modules)\n"
                    "print('ready', flush=True)\ninput()\nprint('new', set(sys.modules) - before)\n")
        p.prints("ready")
        p.signal()
        line = p.says("flush")
        self.assertRegex(line, r"^vramshim: flush \(SIGUSR1\): gave 1 block \(4\.0 MiB\) back")
        p.send()
        p.prints(r"new set\(\)")
        self.assertEqual(p.end(), 0, p.err)

    def test_imported_and_never_used(self):
        p = Program("import torch, gpu\nx = gpu.allocate(4 * gpu.MIB)\ngpu.free(x)\n"
                    "torch.cuda.is_initialized = lambda: False\nprint('ready', flush=True)\ninput()\n"
                    "print('calls', torch.cuda.calls)\n")
        p.prints("ready")
        p.signal()
        p.says(r"\): gave 1 block")
        p.send()
        p.prints("calls 0")
        self.assertEqual(p.end(), 0, p.err)

    def test_half_imported(self):
        p = Program("import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\nimport gpu\n"
                    "gpu.free(gpu.allocate(4 * gpu.MIB))\nprint('ready', flush=True)\ninput()\n")
        p.prints("ready")
        p.signal()
        p.says(r"\): gave 1 block")
        p.send()
        self.assertEqual(p.end(), 0, p.err)

    def test_one_fails(self):
        """One line, and the other one is drained all the same."""
        p = Program(START + "torch.cuda.failure = RuntimeError('boom\\nand more')\n"
                    "cupy.get_default_memory_pool().keep(4, 32 * gpu.MIB)\n" + READY +
                    "input()\nsay('error', sys.exc_info()[0])\n")
        p.prints("ready")
        p.signal()
        p.says(r"^vramshim: cannot drain torch: RuntimeError: boom$")
        p.says(r"\): CuPy gave up 128\.0 MiB \(.*gave 4 blocks")
        p.send()
        p.prints("error None")
        self.assertEqual(p.end(), 0, p.err)

    def test_switched_off(self):
        p = Program(START + READY + "input()\nsay('calls', torch.cuda.calls)\n", VRAMSHIM_DRAIN="0")
        p.prints("ready")
        p.signal()
        p.says("nothing was kept")
        p.send()
        p.prints("calls 0")
        self.assertEqual(p.end(), 0, p.err)

    def test_without_a_gil(self):
        p = Program(START + "sys._is_gil_enabled = lambda: False\n" + READY + "input()\nsay('calls', torch.cuda.calls)\n")
        p.prints("ready")
        p.signal()
        p.says(r"^vramshim: cannot drain Python: it runs without a GIL$")
        p.send()
        p.prints("calls 0")
        self.assertEqual(p.end(), 0, p.err)

    def test_leaves_no_trace(self):
        """In __main__, among modules, threads, hooks and pending exceptions."""
        p = Program(START + """
seen = []
sys.setswitchinterval(0.005)
threading.setprofile(lambda *a: seen.append(a))
def state():
    return (sorted(globals()), sorted(sys.modules), [t.name for t in threading.enumerate()], threading.active_count(),
            sys.exc_info(), seen, sys.gettrace(), sorted(os.environ), signal.getsignal(signal.SIGUSR1))
before = after = None
before = state()
""" + READY + "input()\nafter = state()\nsay('same', before == after)\n")
        p.prints("ready")
        p.signal()
        p.says(GAVE)
        p.send()
        p.prints("same True")
        self.assertEqual(p.end(), 0, p.err)

    def test_a_handler_of_the_program(self):
        p = Program(START + "signal.signal(signal.SIGUSR1, lambda *a: say('handled'))\n" + READY + "input()\nsay('end')\n")
        p.prints("ready")
        p.signal()
        p.prints("handled")
        p.says(GAVE)
        p.send()
        p.prints("end")
        self.assertEqual(p.end(), 0, p.err)


class Capture(unittest.TestCase):
    def test_waits_for_its_end(self):
        p = Program(START + "gpu.begin_capture()\n" + READY + "input()\nsay('calls', torch.cuda.calls)\ngpu.end_capture()\n"
                    "say('captured')\ninput()\nsay('used', gpu.used() // gpu.MIB)\n")
        p.prints("ready")
        p.signal()
        p.says("a CUDA graph is being captured")
        time.sleep(0.3)
        p.send()
        p.prints("calls 0")
        p.prints("captured")
        p.says("torch gave up 512.0 MiB")
        p.send()
        p.prints("used 16")
        self.assertEqual(p.end(), 0, p.err)

    def test_one_that_begins_meanwhile_is_not_harmed(self):
        p = Program(START + "torch.cuda.delay = 0.5\n" + READY + """
while not torch.cuda.calls:
    time.sleep(0.001)
gpu.begin_capture()
time.sleep(1)
gpu.end_capture()
say('captured', torch.cuda.calls)
input()
""")
        p.prints("ready")
        p.signal()
        p.prints("captured 1")
        p.send()
        self.assertEqual(p.end(), 0, p.err)


class Ends(unittest.TestCase):
    def catches(self, pid):
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", pathlib.Path(f"/proc/{pid}/status").read_text())
        return int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1

    def test_at_start(self):
        """Signals from load on, before the first import."""
        p = Program(START + READY + "input()\nsay('end')\n")
        while not self.catches(p.process.pid):
            pass
        while "ready" not in p.out and p.process.poll() is None:
            p.signal()
            time.sleep(0.002)
        p.send()
        p.prints("end")
        self.assertEqual(p.end(), 0, p.err)

    def test_while_the_interpreter_ends(self):
        for when in ("import atexit\natexit.register(lambda: os.kill(os.getpid(), signal.SIGUSR1))\n",
                     "class Last:\n    def __del__(self, kill=os.kill, pid=os.getpid(), s=signal.SIGUSR1): kill(pid, s)\n"
                     "last = Last()\n",
                     "threading.Thread(target=lambda: [(os.kill(os.getpid(), signal.SIGUSR1), time.sleep(0.001))\n"
                     "                                 for _ in range(10000)], daemon=True).start()\ntime.sleep(0.05)\n"):
            for _ in range(5):
                p = Program(START + when + "say('end')\n")
                p.prints("end")
                self.assertEqual(p.end(), 0, p.err)

    def test_the_end_waits_for_a_drain_that_has_begun(self):
        """A framework is not left in the middle of it: with C++ on the stack that would abort the program."""
        p = Program(START + """
torch.cuda.delay = 1
empty = torch.cuda.empty_cache
def empty_cache():
    empty()
    os.write(1, b'emptied\\n')
torch.cuda.empty_cache = empty_cache
""" + READY + "while not torch.cuda.calls: time.sleep(0.001)\nsay('main ends')\n")
        p.prints("ready")
        p.signal()
        p.prints("main ends")
        p.prints("emptied")
        self.assertEqual(p.end(), 0, p.err)

    def test_embedded(self):
        """Python comes up in a program, goes down, and the program goes on."""
        library = pathlib.Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
        if not library.exists() or ".so" not in library.name:
            self.skipTest("no libpython")
        script = HERE / "embedded.py"
        p = Program(None, command=[EMBEDDED, str(library), str(script)])
        p.prints("ready")
        p.signal()
        p.says("torch gave up 512.0 MiB")
        p.send()
        p.prints("ended")
        p.signal()
        p.says(r"\): (gave|nothing)")
        p.send()
        self.assertEqual(p.end(), 0, p.err)


class Idleness(unittest.TestCase):
    GAVE = r"flush \(idle for 500\.0 ms\): torch gave up 512\.0 MiB .*; gave 8 blocks"

    def test_by_itself(self):
        """Once each time that the program has been at work; and it finds its memory when it goes on."""
        p = Program(START + READY + "input()\nsay('used', gpu.used() // gpu.MIB)\ntorch.cuda.keep(8, 64 * gpu.MIB)\n"
                    "say('again')\ninput()\nsay('used', gpu.used() // gpu.MIB)\n", VRAMSHIM_IDLE_DRAIN="0.5")
        for wait in ("ready", "again"):
            p.prints(wait)
            p.says(self.GAVE)
            time.sleep(1)
            self.assertEqual(sum("idle" in line for line in p.err), 1 + (wait == "again"), p.err)
            p.send()
            p.prints("used 16")
        self.assertEqual(p.end(), 0, p.err)

    def test_not_among_launches(self):
        """torch at work makes no call about memory for hours."""
        for name in ("cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchCooperativeKernel", "cuGraphLaunch"):
            p = Program(START + READY + f"gpu.launch_for(2, '{name}')\nsay('calls', torch.cuda.calls)\ninput()\n",
                        VRAMSHIM_IDLE_DRAIN="0.5")
            p.prints("ready")
            p.prints("calls 0")
            p.says(self.GAVE)
            p.send()
            self.assertEqual(p.end(), 0, p.err)

    def test_beside_the_signal(self):
        p = Program(START + READY + "input()\n", VRAMSHIM_IDLE_DRAIN="1000", VRAMSHIM_SIGNAL="USR2")
        p.prints("ready")
        os.kill(p.process.pid, signal.SIGUSR2)
        p.says(r"flush \(SIGUSR2\): torch gave up 512\.0 MiB")
        p.send()
        self.assertEqual(p.end(), 0, p.err)

    def test_without_a_signal(self):
        p = Program(START + READY + "input()\n", VRAMSHIM_IDLE_DRAIN="0.5", VRAMSHIM_SIGNAL="none")
        p.prints("ready")
        p.says(self.GAVE)
        p.send()
        self.assertEqual(p.end(), 0, p.err)


class Children(unittest.TestCase):
    def test_forked_worker(self):
        """A worker that uses no GPU: signals reach it, nobody drains in it; nor does a fork while its parent drains harm it."""
        p = Program(START + "torch.cuda.delay = 0.3\n" + READY + """
while not torch.cuda.calls:
    time.sleep(0.001)
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.2)
    say('child', torch.cuda.calls)
    sys.exit(5)
say('status', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
input()
say('used', gpu.used() // gpu.MIB)
""")
        p.prints("ready")
        p.signal()
        p.prints("child 1")
        p.prints("status 5")
        p.says(GAVE)
        p.send()
        p.prints("used 16")
        self.assertEqual(p.end(), 0, p.err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
