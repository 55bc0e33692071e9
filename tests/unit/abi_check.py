#!/usr/bin/env python3
"""Compares our declarations of the CUDA driver API with the real cuda.h of CUDA 13.

    abi_check.py CC INCLUDE [CUDA_H]

CC: a C compiler; INCLUDE: our include folder; CUDA_H: the real header, else the usual places are looked at. Ends with 77
(skipped) where there is none.

It writes a C file that declares both sets of names side by side, ours renamed with a prefix, and lets the compiler
compare: _Static_assert for the size of each type, the offset and size of each field and the value of each enumerator;
and for each prototype the two types, parameter by parameter, written out with the typedefs resolved. So nothing is
compared by luck of formatting, and a name that the real header lacks is an error.
"""
import os
import re
import subprocess
import sys

PLACES = ['/usr/local/cuda/include/cuda.h', '/usr/include/cuda.h', '/opt/cuda/include/cuda.h']
SIMULATED_ENTRIES = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'simdriver', 'entries.def')
PREFIX = 'ours_'
ELSEWHERE = ('cuGL', 'cuVDPAU')  # declared by headers that need others which are seldom there


def preprocess(cc, path, *flags):
    command = cc + ['-E', '-P', '-x', 'c', '-std=gnu11', *flags, path]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.sub(r'\b(__attribute__|__declspec)\s*\(\(.*?\)\)', '', text)


def split_arguments(text):
    depth, part, parts = 0, '', []
    for c in text:
        depth += (c == '(') - (c == ')')
        if c == ',' and not depth:
            parts.append(part)
            part = ''
        else:
            part += c
    return [p.strip() for p in parts + [part] if p.strip() and p.strip() != 'void']


def prototypes(text):
    found = {}
    for name, arguments in re.findall(r'\bCUresult\s+(?:\*\s*)?(cu\w+)\s*\(([^;{}]*)\)\s*;', text):
        found[name] = split_arguments(' '.join(arguments.split()))
    return found


def parameter_type(parameter):
    """The type alone: without the parameter's name; an array is a pointer."""
    parameter = re.sub(r'\[\w*\]', '*', parameter)
    tokens = re.findall(r'\w+|\*', parameter)
    words = [t for t in tokens if t not in ('const', '*', 'struct', 'unsigned', 'signed', 'enum')]
    builtin = {'int', 'char', 'short', 'long', 'float', 'double', 'void', 'size_t'}
    # Drop the last word if it is not what the type is made of.
    if tokens and tokens[-1] != '*' and tokens[-1] not in builtin and (
            len(words) > 1 or 'unsigned' in tokens[:-1]):
        tokens = tokens[:-1]
    return ' '.join(tokens)


def normal(kind):
    """One spelling for what is one type: typedefs of integers are resolved, versions of a struct are the struct."""
    kind = re.sub(r'\bcuuint64_t\b', 'uint64_t', kind)
    kind = re.sub(r'\bcuuint32_t\b', 'uint32_t', kind)
    kind = re.sub(r'\bCUdeviceptr_v2\b', 'CUdeviceptr', kind)
    kind = re.sub(r'\bCUdevice_v1\b', 'CUdevice', kind)
    return kind if 'CUdeviceptr_v1' in kind else re.sub(r'_v[12]\b', '', kind)


def main():
    cc, include = sys.argv[1].split(), sys.argv[2]
    candidates = [sys.argv[3]] if len(sys.argv) > 3 else PLACES
    real = next((p for p in candidates if os.path.isfile(p)), None)
    if not real:
        print('no cuda.h here')
        return 77
    ours_path = os.path.join(include, 'vramshim', 'cuda_abi.h')
    version = re.search(r'#define\s+CUDA_VERSION\s+(\d+)', open(real).read())
    if not version or int(version.group(1)) // 1000 != 13:
        print(f'{real} is not CUDA 13')
        return 77

    source = open(ours_path).read()
    bare = re.sub(r'/\*.*?\*/', '', source, flags=re.S)
    ours_text = preprocess(cc, ours_path)
    theirs = prototypes(preprocess(cc, real))
    theirs.update({n: a for n, a in prototypes(preprocess(cc, real, '-D__CUDA_API_VERSION_INTERNAL')).items()
                   if n not in theirs})
    # What the real header declares only as its per-thread variant has the same arguments without.
    for name in list(theirs):
        if name.endswith(('_ptsz', '_ptds')):
            theirs.setdefault(name[:-5], theirs[name])
    ours = prototypes(ours_text)

    wrong = 0
    enumerators = []
    for body in re.findall(r'enum\s+\w+\s*\{(.*?)\}', bare, flags=re.S):
        enumerators += re.findall(r'^\s*(CU\w+)\s*=', body, flags=re.M)
    handles = re.findall(r'typedef struct \w+ \*(CU\w+);', bare)
    structs = re.findall(r'typedef struct (\w+) \{(.*?)\n\} (\w+);', bare, flags=re.S)
    enums = re.findall(r'\}\s*(CU\w+);', ' '.join(re.findall(r'typedef enum .*?;', bare, flags=re.S)))
    scalars = re.findall(r'typedef [\w ]+ (CU\w+);', bare)

    # Ours, with a prefix on every name, after the real one in the same file.
    names = set(re.findall(r'\b(?:CU\w+|cu[A-Z]\w+|cudaError_enum)\b', bare)) - {'CU_STREAM_LEGACY', 'CU_STREAM_PER_THREAD'}
    renamed = re.sub(r'\b(\w+)\b', lambda m: PREFIX + m.group(1) if m.group(1) in names else m.group(1), bare)
    renamed = re.sub(r'^\s*#\s*(include|ifndef VRAM|define|error|endif|ifndef __LP64__).*$', '', renamed, flags=re.M)
    lines = ['#define __CUDA_API_VERSION_INTERNAL 1', f'#include "{real}"', '#include <stddef.h>', '#include <stdint.h>',
             renamed]
    checks = 0

    def same(first, second):
        nonlocal checks
        checks += 1
        lines.append(f'_Static_assert(({first}) == ({second}), "{first}");')

    for name in enumerators:
        same(f'(long long){PREFIX}{name}', f'(long long){name}')
    for name in [s[2] for s in structs] + enums + handles + scalars:
        same(f'sizeof({PREFIX}{name})', f'sizeof({name})')
    for _, body, name in structs:
        body = re.sub(r'union \{(?:[^{}]|\{[^{}]*\})*\}', '', body)  # as one field
        for field in re.findall(r'(\w+)(?:\[\w+\])?;', re.sub(r'struct \{.*?\}', '', body, flags=re.S)):
            same(f'offsetof({PREFIX}{name}, {field})', f'offsetof({name}, {field})')
            same(f'sizeof((({PREFIX}{name} *)0)->{field})', f'sizeof((({name} *)0)->{field})')
        for inner, field in re.findall(r'struct \{(.*?)\} (\w+);', body, flags=re.S):
            for part in re.findall(r'(\w+)(?:\[\w+\])?;', inner):
                same(f'offsetof({PREFIX}{name}, {field}.{part})', f'offsetof({name}, {field}.{part})')
    program = subprocess.run(cc + ['-std=gnu11', '-fsyntax-only', '-w', '-x', 'c', '-'], input='\n'.join(lines),
                             capture_output=True, text=True)
    if program.returncode:
        print(program.stderr[:4000])
        wrong += 1

    compared = 0
    for name, arguments in sorted(ours.items()):
        if name.startswith(ELSEWHERE):
            continue
        if name not in theirs:
            print(f'{name}: not in {real}')
            wrong += 1
            continue
        mine = [normal(parameter_type(a)) for a in arguments]
        real_types = [normal(parameter_type(a)) for a in theirs[name]]
        compared += 1
        if mine != real_types:
            print(f'{name}: ours ({", ".join(mine)}), real ({", ".join(real_types)})')
            wrong += 1

    # The simulated driver's list may write int for an enumeration and void for what it does not look into.
    loose = 0
    text = re.sub(r'/\*.*?\*/', '', open(SIMULATED_ENTRIES).read(), flags=re.S)
    for name, arguments in re.findall(r'SIM(?:_PT)?\((cu\w+),(?:\s*_pt[sd][sz],)?\s*\d+,[^(]*\(([^()]*)\)', text):
        if name in ours or name not in theirs:
            continue
        loose += 1
        mine, real_arguments = split_arguments(' '.join(arguments.split())), theirs[name]
        if len(mine) != len(real_arguments):
            print(f'entries.def: {name} takes {len(mine)} arguments, really {len(real_arguments)}')
            wrong += 1
            continue
        for a, b in zip(mine, real_arguments):
            a, b = (normal(parameter_type(t)).replace('uint64_t', 'unsigned long long') for t in (a, b))
            both_pointers = a.count('*') and b.count('*')
            if a != b and not (both_pointers and ('void' in a or a.replace('int', '') != a)) and not (
                    a == 'int' and b.startswith('CU')) and a.replace('CUdeviceptr_v1', 'unsigned int') != b:
                print(f'entries.def: {name}: {a} for {b}')
                wrong += 1

    print(f'{checks} sizes, offsets and values, {compared} prototypes, {loose} entries of the simulated driver: '
          f'{"equal" if not wrong else f"{wrong} differ"}')
    if not checks or not compared or not loose:
        print('found nothing to compare')
        wrong += 1
    return 1 if wrong else 0


sys.exit(main())
