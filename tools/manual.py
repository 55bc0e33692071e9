#!/usr/bin/env python3
"""manual.py OPTIONS_DEF VERSION <PAGE.in >PAGE: a manual page with the options of include/vramshim/options.def in it."""
import re, sys

definitions, version = sys.argv[1:3]


def troff(text):
    return text.replace("\\", "\\\\").replace("-", "\\-")


options = []
for line in open(definitions, encoding="utf-8"):
    if m := re.match(r'VRAM_OPTION\((\w+), \w+, \w+, "([^"]*)", "([^"]*)"\)', line):
        options.append(f".TP\n.BR VRAMSHIM_{m[1]} \" (default \\fB{troff(m[2])}\\fR)\"\n{troff(m[3][0].upper() + m[3][1:])}.")
if not options:
    sys.exit(f"{definitions}: no option found")
page = sys.stdin.read()
sys.stdout.write(page.replace("@OPTIONS@", "\n".join(options)).replace("@VERSION@", version))
