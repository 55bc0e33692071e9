#!/usr/bin/python3
"""What vramctl promises, and what it does with each wrong command line, library and program.

    test_vramctl.py VRAMCTL SHIM LOOP STATIC STATIC_PIE [unittest's options]     LD_LIBRARY_PATH finds the simulated driver

Cases that need root, or a mount, are skipped with a word where that cannot be had.
"""
import ctypes, os, pathlib, re, shutil, signal, struct, subprocess, sys, tempfile, unittest

VRAMCTL, SHIM, LOOP, STATIC, STATIC_PIE = (os.path.abspath(a) for a in sys.argv[1:6])
STRANGER = 12345  # a user and a group that own nothing
CAT = shutil.which("cat", path="/usr/bin:/bin")
MAPS = "/proc/self/maps"
LIBC = ctypes.CDLL(None)
AS_ROOT = unittest.skipUnless(os.geteuid() == 0, "needs root")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("VRAMSHIM_") and k != "LD_PRELOAD"}


def no_new_rights():
    PR_SET_NO_NEW_PRIVS = 38
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


class Case(unittest.TestCase):
    def setUp(self):
        self.tree = pathlib.Path(tempfile.mkdtemp(prefix="vramctl."))
        self.tree.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.tree)

    def ctl(self, *arguments, vramctl=VRAMCTL, env={}, user=None, **more):
        more.setdefault("stdout", subprocess.PIPE)
        if user:
            more.update(user=user, group=user, extra_groups=[])
        env = {k: v for k, v in {**ENVIRONMENT, **env}.items() if v is not None}
        return subprocess.run([vramctl, *map(str, arguments)], env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                              text=True, timeout=60, **{"cwd": self.tree, **more})

    def refused(self, *arguments, says, status=2, **more):
        """One line on stderr, nothing on stdout, nothing started."""
        r = self.ctl(*arguments, **more)
        self.assertEqual(r.returncode, status, r)
        self.assertRegex(r.stderr, r"\A[^\n]*" + says + r"[^\n]*\n\Z")
        self.assertFalse(r.stdout, r)
        return r

    def runs(self, *arguments, **more):
        r = self.ctl(*arguments, **more)
        self.assertEqual((r.returncode, r.stderr), (0, ""), r)
        return r.stdout

    def under_the_shim(self, *arguments, **more):
        """The program prints its own /proc/self/maps."""
        self.assertIn("libvramshim", self.runs(*arguments, **more))

    def refused_rightly(self, *command, user=None, vramctl=VRAMCTL, says, **more):
        """Refused, and the loader does not in fact load the library there."""
        self.refused("run", "--", *command, user=user, vramctl=vramctl, says=says, **more)
        shim = pathlib.Path(vramctl).parent / "../shim/libvramshim.so"
        maps = self.runs(f"LD_PRELOAD={shim}", *command, vramctl=shutil.which("env"), user=user, **more)
        self.assertIn("/libc.so", maps)
        self.assertNotIn("libvramshim", maps)

    def file(self, name, content, mode=0o755):
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
        return path

    def changed(self, source, name, *changes):
        """A copy with bytes replaced (by as many), or put at an offset."""
        content = bytearray(pathlib.Path(source).read_bytes())
        for place, new in changes:
            if isinstance(place, bytes):
                self.assertIn(place, content)
                self.assertEqual(len(place), len(new))
                content = content.replace(place, new)
            else:
                content[place : place + len(new)] = new
        return self.file(name, bytes(content))

    def copies(self, folder):
        """vramctl and the library in another place, where anybody may read them."""
        for source, name in ((VRAMCTL, "tools/vramctl"), (SHIM, "shim/libvramshim.so")):
            self.file(f"{folder}/{name}", pathlib.Path(source).read_bytes())
        return self.tree / folder / "tools/vramctl"

    def mount(self, options):
        place = self.tree / "mounted"
        place.mkdir()
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755," + options, "vramctl", place],
                                               stderr=subprocess.DEVNULL).returncode:
            self.skipTest("cannot mount here")
        self.addCleanup(subprocess.run, ["umount", place], check=True)
        return place


class Commands(Case):
    def test_without_a_command(self):
        r = self.ctl()
        self.assertEqual((r.returncode, r.stdout), (2, ""))
        self.assertIn("usage: vramctl COMMAND", r.stderr)

    def test_help_and_version(self):
        for arguments in (["help"], ["--help"], ["-h"]):
            self.assertRegex(self.runs(*arguments), r"(?s)usage: vramctl COMMAND.*run .*help .*version ")
        for arguments in (["help", "run"], ["run", "--help"], ["run", "-h"], ["--help", "run"], ["run", "--cache=1", "--help"]):
            self.assertRegex(self.runs(*arguments), r"(?s)usage: vramctl run.*--cache-max=BYTES.*--library=PATH")
        for arguments in (["help", "help"], ["help", "--help"]):
            self.assertIn("usage: vramctl help", self.runs(*arguments))
        for arguments in (["help", "version"], ["version", "-h"]):
            self.assertIn("usage: vramctl version", self.runs(*arguments))
        for arguments in (["version"], ["--version"]):
            self.assertRegex(self.runs(*arguments), r"\Avramctl \d+\.\d+\.\d+\n\Z")

    def test_wrong(self):
        self.refused("frobnicate", says="no command frobnicate; vramctl help lists them")
        self.refused("runn", says=r"no command runn; did you mean vramctl run\?")
        self.refused("", says="no command ''")
        self.refused("-x", says="no command -x")
        self.refused("version", "1", says="vramctl version: takes no argument")
        self.refused("--version", "1", says="vramctl version: takes no argument")
        self.refused("help", "run", "version", says="vramctl help: takes one command")
        self.refused("help", "versoin", says=r"no command versoin; did you mean vramctl version\?")
        self.refused("help", "zzz", says="no command zzz")

    def test_stdout_that_cannot_be_written(self):
        for arguments in (["help"], ["--help"], ["run", "--help"], ["help", "run"], ["version"]):
            with open("/dev/full", "w") as full:
                self.refused(*arguments, stdout=full, status=1, says="vramctl: cannot write to standard output: No space left")
            self.refused(*arguments, stdout=None, preexec_fn=lambda: os.close(1), status=1, says="standard output: Bad file desc")
        # Where nothing is printed, it does not matter.
        self.refused("frobnicate", stdout=None, preexec_fn=lambda: os.close(1), says="no command")
        self.runs("run", "--", "true", stdout=None, preexec_fn=lambda: os.close(1))


class Options(Case):
    def test_a_value_with_and_without_the_sign(self):
        code = "import os; print(os.environ['VRAMSHIM_CACHE_MAX'], os.environ.get('VRAMSHIM_FREE'))"
        program = ("/usr/bin/python3", "-c", code)
        self.assertEqual(self.runs("run", "--cache-max=4G", "--free", "fenced", "--", *program), "4G fenced\n")
        self.assertEqual(self.runs("run", "--cache-max", "4G", *program), "4G None\n")
        self.assertEqual(self.runs("run", "--cache-max=1G", "--cache-max=2G", *program, env={"VRAMSHIM_CACHE_MAX": "3G"}),
                         "2G None\n")

    def test_options_end_at_the_program(self):
        self.assertEqual(self.runs("run", "echo", "--cache=bogus", "--help"), "--cache=bogus --help\n")
        self.assertEqual(self.runs("run", "--cache=1", "--", "echo", "--", "-h"), "-- -h\n")

    def test_values_are_checked_by_the_library(self):
        touch = ("--", "touch", "started")
        self.refused("run", "--cache-max=bogus", *touch, says="vramctl run: --cache-max=bogus .* it takes a size")
        self.refused("run", "--cache-max", "-1", *touch, says="vramctl run: --cache-max=-1 ")
        self.refused("run", "--cache=", *touch, says="vramctl run: --cache= ")
        self.refused("run", "--free", "", *touch, says="vramctl run: --free= ")
        self.refused("run", "--signal=KILL", *touch, says="vramctl run: --signal=KILL ")
        self.refused("run", "--waste=a\nvramshim: flush", *touch, says=r"vramctl run: --waste=a\\nvramshim: flush ")
        r = self.ctl("run", "--cache=7", "--cache-max=1G", "--signal=99", *touch)
        self.assertEqual((r.returncode, r.stderr.count("\n")), (2, 2))
        self.assertFalse((self.tree / "started").exists())
        # In the library's own words, but for the name.
        why = ctypes.create_string_buffer(1000)
        ctypes.CDLL(SHIM).vramshim_check_option(b"SLACK", b"0.5", why, len(why))
        self.assertEqual(self.refused("run", "--slack=0.5", "true", says="--slack").stderr, why.value.decode().replace("VRAMSHIM_SLACK", "vramctl run: --slack") + "\n")

    def test_without_a_value(self):
        for arguments in (["--cache"], ["--cache", "--", "true"], ["--cache", "--verbose=1", "true"], ["--library"],
                          ["--library", "--", "true"]):
            self.refused("run", *arguments, says=f"vramctl run: {arguments[0]} needs a value")

    def test_unknown(self):
        self.refused("run", "--cashe=1", "true", says=r"no option --cashe=1; did you mean --cache\?")
        self.refused("run", "--cache_max=1G", "true", says=r"did you mean --cache-max\?")
        self.refused("run", "--VRAMSHIM_SLACK=2", "true", says=r"did you mean --slack\?")
        self.refused("run", "-cache=1", "true", says=r"no option -cache=1; did you mean --cache\?")
        self.refused("run", "--hlep", says=r"did you mean --help\?")
        self.refused("run", "--frobnicate", "true", says="no option --frobnicate; vramctl run --help lists them")
        self.refused("run", "-x", "true", says="no option -x;")
        self.refused("run", "--" + "x" * 5000, "true", says=r"no option --x+\.\.\.;")
        self.refused("run", "--a\x1b[31m\nb", "true", says=r"no option --a\\x1b\[31m\\nb;")
        self.refused("run", "--help=x", says="no option --help=x")

    def test_abbreviations_are_refused(self):
        self.refused("run", "--rep=none", "true", says=r"no option --rep=none; did you mean --report\?")
        self.refused("run", "--cache-m", "1G", "true", says=r"did you mean --cache-max\?")
        self.refused("run", "--hel", says=r"did you mean --help\?")

    def test_without_a_program(self):
        for arguments in ([], ["--"], ["--cache=1"], ["--cache=1", "--"], ["--cache=bogus"]):
            self.refused("run", *arguments, says="which program")


class Library(Case):
    def test_it_serves_a_program(self):
        r = self.ctl("run", "--report=" + str(self.tree / "report"), "--", LOOP, "--iterations", "10", "--quiet")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertIn("served from the cache", next(self.tree.glob("report.*")).read_text())

    def test_what_is_none(self):
        def no(library, says):
            self.refused("run", "--library", library, "--", "touch", self.tree / "started", says=says)
            self.assertFalse((self.tree / "started").exists())

        no("missing", "/missing: No such file or directory")
        no("", "'': No such file")
        no(self.tree, " is a folder")
        no(self.file("words", "no library\n"), "words is no libvramshim.so")
        no(self.file("empty", ""), "empty is no libvramshim.so")
        no(CAT, "cat is no libvramshim.so")
        no(VRAMCTL, "vramctl is no libvramshim.so")
        no("/dev/null", "null is no libvramshim.so")
        no("a\nb", r"/a\\nb: No such file")
        libm = next(l.split()[-1] for l in pathlib.Path(MAPS).read_text().splitlines() if "/libm.so" in l or "/libm-" in l)
        no(libm, " is no libvramshim.so")
        os.mkfifo(self.tree / "fifo")
        no("fifo", "fifo is no libvramshim.so")

    def test_what_the_loader_cannot_load(self):
        def no(library, says):
            self.refused("run", "--library", library, "--", "echo", says=says)

        shim = pathlib.Path(SHIM).read_bytes()
        machine, name = (183, "AArch64") if os.uname().machine == "x86_64" else (62, "x86-64")
        no(self.changed(SHIM, "machine.so", (18, struct.pack("<H", machine))), f"is built for {name}, this vramctl for ")
        no(self.changed(SHIM, "bits.so", (4, b"\1")), "bits.so is built for ")
        no(self.file("half.so", shim[: len(shim) // 8]), "half.so is not whole")
        no(self.changed(SHIM, "needs.so", (b"libc.so.6\0", b"libq.so.6\0")), "vramctl run: libq.so.6: cannot open shared object")
        no(self.changed(SHIM, "libc.so", (b"GLIBC_2.17\0", b"GLIBC_9.99\0") if b"GLIBC_2.17\0" in shim else
                        (b"GLIBC_2.2.5\0", b"GLIBC_9.9.9\0")), "libc.so.* version")
        no(self.changed(SHIM, "old.so", (b"vramshim_check_option\0", b"vramshim_did_not_yet_\0")), "older than this vramctl")

    @AS_ROOT
    def test_unreadable(self):
        vramctl = self.copies("open")
        library = self.tree / "open/shim/libvramshim.so"
        self.under_the_shim("run", "--", CAT, MAPS, vramctl=vramctl, user=STRANGER)
        library.chmod(0o700)
        self.refused("run", "--", CAT, MAPS, vramctl=vramctl, user=STRANGER, says="libvramshim.so: Permission denied")

    def test_where_nothing_may_be_run(self):
        library = shutil.copy(SHIM, self.mount("noexec"))
        self.refused("run", "--library", library, "--", "echo", says="libvramshim.so: .*mounted noexec")

    def test_beside_no_vramctl(self):
        vramctl = self.copies("alone")
        (self.tree / "alone/shim/libvramshim.so").unlink()
        self.refused("run", "true", vramctl=vramctl, says="is not beside this vramctl; name it by --library")
        self.under_the_shim("run", "--library", SHIM, CAT, MAPS, vramctl=vramctl)

    def test_paths_that_the_loader_takes_apart(self):
        for folder, what in (("a b", "a blank"), ("a:b", "a colon"), ("a$LIB", r"a \$ that"), ("a${ORIGIN}b", r"a \$ that"),
                             ("$PLATFORM", r"a \$ that")):
            with self.subTest(folder):
                vramctl = self.copies(folder)
                library = self.tree / folder / "shim/libvramshim.so"
                self.refused("run", "--", "touch", "started", vramctl=vramctl, says=f"no path with {what}.*--library")
                self.refused("run", "--library", library, "--", "touch", "started", says=f"no path with {what}")
                self.refused("run", "--library", "shim/libvramshim.so", "--", "touch", "started", cwd=self.tree / folder,
                             says=f"no path with {what}")
                self.assertFalse((self.tree / "started").exists())
                self.assertNotIn("libvramshim", self.ctl(f"LD_PRELOAD={library}", CAT, MAPS, vramctl=shutil.which("env")).stdout)
                # What the line says to do.
                link = self.tree / "link.so"
                link.symlink_to(library)
                self.under_the_shim("run", "--library", link, "--", CAT, MAPS, vramctl=vramctl)
                self.under_the_shim("run", "--library", "link.so", "--", CAT, MAPS, vramctl=vramctl)
                link.unlink()

    def test_paths_that_only_look_so(self):
        for folder in ("a\nb", "a\tb", "$", "$x", "a$", "ä", "a;b", "'", "%p"):
            with self.subTest(folder):
                self.under_the_shim("run", "--", CAT, MAPS, vramctl=self.copies(folder))

    def test_a_relative_path_is_made_absolute(self):
        self.copies("here")
        self.assertEqual(self.runs("run", "--library=here/shim/libvramshim.so", "sh", "-c", 'cd /; echo "$LD_PRELOAD"'),
                         f"{self.tree}/here/shim/libvramshim.so\n")


class Preload(Case):
    def preloaded(self, before, *arguments, **more):
        return self.runs("run", *arguments, "--", "sh", "-c", 'printf %s "$LD_PRELOAD"', env={"LD_PRELOAD": before}, **more)

    def test_in_front_of_what_is_there(self):
        self.assertEqual(self.preloaded(None), SHIM)
        self.assertEqual(self.preloaded(""), SHIM)
        self.assertEqual(self.preloaded("libm.so.6"), SHIM + ":libm.so.6")
        self.assertEqual(self.preloaded("libm.so.6 libdl.so.2"), SHIM + ":libm.so.6 libdl.so.2")

    def test_not_twice(self):
        link = self.tree / "link"
        link.symlink_to(os.path.dirname(SHIM))
        for before in (SHIM, f"libm.so.6:{SHIM}", f" {SHIM}:", f"{link}/libvramshim.so",
                       f"libm.so.6 {link}/../shim/libvramshim.so"):
            self.assertEqual(self.preloaded(before), before)
        path = f"{os.path.dirname(SHIM)}:{ENVIRONMENT.get('LD_LIBRARY_PATH', '')}"
        self.assertEqual(self.runs("run", "sh", "-c", 'printf %s "$LD_PRELOAD"',
                                   env={"LD_PRELOAD": "libvramshim.so", "LD_LIBRARY_PATH": path}), "libvramshim.so")
        # A bare name that leads nowhere is none, though the library itself has that name.
        r = self.ctl("run", "sh", "-c", 'printf %s "$LD_PRELOAD"', env={"LD_PRELOAD": "libvramshim.so", "LD_LIBRARY_PATH": None})
        self.assertEqual((r.returncode, r.stdout.count(":libvramshim.so"), r.stdout.startswith("/")), (0, 1, True), r)

    def test_before_another_copy(self):
        self.copies("other")
        other = f"{self.tree}/other/shim/libvramshim.so"
        self.assertEqual(self.preloaded(other), f"{SHIM}:{other}")
        self.assertEqual(self.preloaded(f"{other}:{SHIM}"), f"{SHIM}:{other}:{SHIM}")
        self.assertEqual(self.preloaded(f"{SHIM}:{other}"), f"{SHIM}:{other}")
        self.assertEqual(self.preloaded(SHIM, f"--library={other}"), f"{other}:{SHIM}")

    def test_nothing_is_left_in_the_program(self):
        """Signals and descriptors are as without vramctl, whatever was preloaded into it."""
        def look(command, env={}):
            def inherit():
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                signal.signal(signal.SIGUSR2, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])

            script = "grep -E '^(Sig|Shd)(Blk|Ign|Cgt|Pnd)|^Threads' /proc/self/status; ls /proc/self/fd"
            return subprocess.run([*command, "env", "-u", "LD_PRELOAD", "sh", "-c", script], env={**ENVIRONMENT, **env},
                                  stdout=subprocess.PIPE, preexec_fn=inherit, restore_signals=False, check=True).stdout

        self.copies("other")
        natively = look([])
        for preload in ("", SHIM, f"{self.tree}/other/shim/libvramshim.so"):
            for option in ("USR1", "USR2"):
                self.assertEqual(look([VRAMCTL, "run", "--signal", option, "--"], {"LD_PRELOAD": preload,
                                                                                  "VRAMSHIM_SIGNAL": option}), natively)

    def test_too_long(self):
        self.refused("run", "--", "true", env={"LD_PRELOAD": ":" * 131040}, status=126, says="true: Argument list too long")


class Program(Case):
    def test_not_found_and_not_executable(self):
        self.refused("run", "--", "frobnicate-this", env={"PATH": "/usr/bin:/bin"}, status=127,
                     says="vramctl run: frobnicate-this: No such file")
        self.refused("run", "--", "./frobnicate", status=127, says="No such file")
        self.refused("run", "--", "", status=127, says="'': No such file")
        self.refused("run", "--", "a\nb", status=127, says=r"vramctl run: a\\nb: No such file")
        self.refused("run", "--", self.file("script", "#!/bin/sh\n", 0o644), status=126, says="script: Permission denied")
        self.refused("run", "--", self.tree, status=126, says="Permission denied")
        self.refused("run", "--", self.file("crlf", "#!/bin/sh\r\n"), status=127, says="crlf: what is to interpret it is not there")
        self.assertEqual(self.ctl("run", "--", "sh", "-c", "exit 7").returncode, 7)

    def test_statically_linked(self):
        for program in (STATIC, STATIC_PIE):
            self.refused("run", "--", program, says=f"{program} is statically linked.*vramctl run -- env {program}")
            self.assertEqual(self.runs("run", "--", "env", program), "ran\n")  # what the line says to do
        path = f"{os.path.dirname(STATIC)}:{os.environ['PATH']}"
        self.refused("run", "static", env={"PATH": path}, says="/static is statically linked")
        for path in ("/nowhere::/bin", ":/bin", "/bin:"):  # an empty part is the current folder
            self.refused("run", "static", env={"PATH": path}, cwd=os.path.dirname(STATIC), says=" static is statically linked")
        (self.tree / "a\nb").symlink_to(STATIC)
        self.refused("run", "./a\nb", says=r"\./a\\nb is statically linked")

    def test_found_as_execvp_finds_it(self):
        (self.tree / "first/static").mkdir(parents=True)  # a folder, and a file that may not be run, are passed over
        self.file("second/static", "", 0o644)
        self.refused("run", "static", env={"PATH": f"first:second:{os.path.dirname(STATIC)}"},
                     says=f"{STATIC} is statically linked")
        self.under_the_shim("run", "cat", MAPS, env={"PATH": None})

    def test_the_loader_as_a_program(self):
        loader = re.search(rb"/lib[^\0]*/ld-linux[^\0]*", pathlib.Path(CAT).read_bytes())[0].decode()
        self.under_the_shim("run", "--", loader, CAT, MAPS)

    def test_of_another_machine_or_libc(self):
        machine, name = (183, "AArch64") if os.uname().machine == "x86_64" else (62, "x86-64")
        no = lambda says, *changes: self.refused("run", "--", self.changed(CAT, "program", *changes), says=says)
        no(f"program is built for {name}, and", (18, struct.pack("<H", machine)))
        no("program is built for ", (4, b"\1"))
        no("program is built for machine 22, ", (5, b"\2"), (18, struct.pack(">H", 22)))
        loader = re.search(rb"/lib[^\0]*/ld-linux[^\0]*", pathlib.Path(CAT).read_bytes())[0]
        other = b"/lib/ld-musl-x.so.1".ljust(len(loader), b"\0")
        no("program has another C library.*ld-musl-x.so.1", (loader, other))
        # A loader of glibc in another place, as some package managers have it, is not refused.
        place = self.tree / "ld"
        place.symlink_to(loader.decode())
        elsewhere = os.fsencode(place).ljust(len(loader), b"\0")
        if len(elsewhere) == len(loader):
            self.under_the_shim("run", "--", self.changed(CAT, "elsewhere", (loader, elsewhere)), MAPS)

    def test_scripts(self):
        no = lambda text, says: self.refused("run", "--", self.file("script", text), env=path, says=says)
        path = {"PATH": f"{os.path.dirname(STATIC)}:{os.environ['PATH']}"}
        no(f"#!{STATIC}\n", f"{STATIC}, which runs {self.tree}/script, is statically linked.* -- env {self.tree}/script")
        no(f"#! \t{STATIC}\t -x  \n", f"{STATIC}, which runs")
        no(f"#!{STATIC}", f"{STATIC}, which runs")
        no("#!/usr/bin/env static\n", f"{STATIC}, which runs")
        no("#!/usr/bin/env static \t \n", f"{STATIC}, which runs")
        no("#!/usr/bin/env -S A=b static -x\n", f"{STATIC}, which runs")
        no(f"#!{self.file('inner', f'#!{STATIC} -x')}\n", f"{STATIC}, which runs {self.tree}/script,")
        self.assertEqual(self.runs("run", "--", "env", self.file("script", f"#!{STATIC}\n")), "ran\n")

    def test_scripts_that_run(self):
        yes = lambda text: self.under_the_shim("run", "--", self.file("script", text))
        yes(f"#!/bin/sh\ncat {MAPS}\n")
        yes(f"cat {MAPS}\n")  # by sh, without saying so
        yes(f"#!/usr/bin/env sh\ncat {MAPS}\n")
        yes(f"#!/usr/bin/env -S A=b sh -e\ncat {MAPS}\n")
        yes(f"#!/usr/bin/env -S 'sh' -e\ncat {MAPS}\n")
        yes(f"#!/usr/bin/python3\nprint(open('{MAPS}').read())\n")
        yes(f"#!{self.file('inner', f'#!/bin/sh{chr(10)}cat {MAPS}')}\n")
        self.assertEqual(self.ctl("run", "--", self.file("loop", f"#!{self.tree}/loop\n")).returncode, 126)
        damaged = self.file("damaged", b"\x7fELF\2\1\1" + bytes(90))
        self.assertEqual(self.ctl("run", "--", damaged).returncode, self.ctl(damaged, vramctl=shutil.which("env")).returncode)

    def test_a_virtual_environment(self):
        (self.tree / "venv/bin").mkdir(parents=True)
        (self.tree / "venv/bin/python3").symlink_to("/usr/bin/python3")
        (self.tree / "venv/bin/python").symlink_to("python3")
        self.file("venv/pyvenv.cfg", "home = /usr/bin\n")
        code = f"import sys; print(sys.prefix, open('{MAPS}').read())"
        for python in ("venv/bin/python", f"{self.tree}/venv/bin/python3"):
            self.under_the_shim("run", "--", python, "-c", code)

    @AS_ROOT
    def test_set_user_id(self):
        program = shutil.copy(CAT, self.tree / "program")
        os.chown(program, STRANGER, -1)
        os.chmod(program, 0o4755)
        self.refused_rightly(program, MAPS, says="program runs as another user")
        vramctl = self.copies("open")
        os.chown(program, 0, -1)
        os.chmod(program, 0o4711)  # also where it cannot be read
        self.refused_rightly(program, MAPS, vramctl=vramctl, user=STRANGER, says="program runs as another user")
        self.refused("run", "--", self.file("script", f"#!{program}\n"), vramctl=vramctl, user=STRANGER,
                     says="which runs .*/script, runs as")
        # Its owner may.
        os.chmod(program, 0o4755)
        self.under_the_shim("run", "--", program, MAPS)
        self.under_the_shim("run", "--", program, MAPS, vramctl=vramctl, user=STRANGER, preexec_fn=no_new_rights)

    def test_sudo_and_su(self):
        su = shutil.which("su", path="/usr/bin:/bin")
        if not su or not os.stat(su).st_mode & 0o4000:
            self.skipTest("no set-user-ID su here")
        vramctl = self.copies("open")
        self.refused("run", "--", "su", "-c", "true", vramctl=vramctl, user=STRANGER if os.geteuid() == 0 else None,
                     env={"PATH": None}, says="sudo vramctl run -- PROGRAM")

    @AS_ROOT
    def test_set_group_id(self):
        program = shutil.copy(CAT, self.tree / "program")
        os.chown(program, -1, STRANGER)
        os.chmod(program, 0o2755)
        self.refused_rightly(program, MAPS, says="program runs as another group")
        os.chmod(program, 0o2745)  # without leave for the group to run it, the bit means something else
        self.under_the_shim("run", "--", program, MAPS)

    @AS_ROOT
    def test_two_users(self):
        self.refused_rightly(CAT, MAPS, vramctl=self.copies("open"), preexec_fn=lambda: os.setresuid(STRANGER, 0, 0),
                             says="cat would run with two users")

    def test_where_the_bit_means_nothing(self):
        program = shutil.copy(CAT, self.mount("nosuid"))
        os.chown(program, STRANGER, -1)
        os.chmod(program, 0o4755)
        self.under_the_shim("run", "--", program, MAPS)

    @AS_ROOT
    def test_capabilities(self):
        program = shutil.copy(CAT, self.tree / "program")
        vramctl = self.copies("open")
        for flags in (1, 0):  # cap_net_raw=ep, =p
            try:
                os.setxattr(program, "security.capability", struct.pack("<5I", 0x02000000 | flags, 1 << 13, 0, 0, 0))
            except OSError as e:
                self.skipTest(f"no capabilities of files here: {e}")
            self.refused_rightly(program, MAPS, vramctl=vramctl, user=STRANGER, says="program has capabilities of its own")
            self.under_the_shim("run", "--", program, MAPS)  # root has them anyway
            more = dict(vramctl=vramctl, user=STRANGER, preexec_fn=no_new_rights)
            if flags:
                self.refused_rightly(program, MAPS, says="program has capabilities of its own", **more)
            else:
                self.under_the_shim("run", "--", program, MAPS, **more)

    @AS_ROOT
    def test_what_cannot_be_read_is_started(self):
        program = shutil.copy(shutil.which("echo"), self.tree / "program")
        os.chmod(program, 0o711)
        self.assertEqual(self.runs("run", "--", program, "ran", vramctl=self.copies("open"), user=STRANGER), "ran\n")


if __name__ == "__main__":
    del sys.argv[1:6]
    unittest.main()
