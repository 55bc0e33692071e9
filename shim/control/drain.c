#include "control/drain.h"

#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "base/compiler.h"
#include "base/elf.h"
#include "base/futex.h"
#include "base/lock.h"
#include "base/thread.h"
#include "config/options.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heap/life.h"

/* What we use of Python; all of it is in every CPython from 3.8 on. Objects are seen as pointers only. */
#define PYTHON_FUNCTIONS(X)                                                                                            \
    X(int, Py_IsInitialized, (void))                                                                                   \
    X(int, PyGILState_Ensure, (void))                                                                                  \
    X(void, PyGILState_Release, (int))                                                                                 \
    X(void *, PyDict_New, (void))                                                                                      \
    X(int, PyDict_SetItemString, (void *, const char *, void *))                                                       \
    X(void *, PyDict_GetItemString, (void *, const char *))                                                            \
    X(void *, PyEval_GetBuiltins, (void))                                                                              \
    X(void *, PyRun_String, (const char *, int, void *, void *))                                                       \
    X(const char *, PyUnicode_AsUTF8, (void *))                                                                        \
    X(void, PyErr_Clear, (void))                                                                                       \
    X(void, Py_DecRef, (void *))

enum { FILE_INPUT = 257 /* Py_file_input */, CAPTURE_POLL_MS = 1000 };

struct python {
#define X(ret, name, params) ret(*name) params;
    PYTHON_FUNCTIONS(X)
#undef X
    int (*finalizing)(void); /* Py_IsFinalizing from 3.13 on, _Py_IsFinalizing before; NULL: cannot be asked */
};

/* Defined once in our namespace. drain() answers with a line for each framework; see struct vram_drained. */
static const char definitions[] =
    "import _thread, os, sys\n"
    "busy, owner, registered = _thread.allocate_lock(), 0, False\n"
    "\n"
    "def wait():\n"
    "    if owner == os.getpid():\n"
    "        busy.acquire(timeout=5)\n"
    "\n"
    "def torch(module, devices):\n"
    "    cuda = getattr(module, 'cuda', None)\n"
    "    if not hasattr(cuda, 'is_initialized') or not cuda.is_initialized():\n"
    "        return None\n"
    "    def held():\n"
    "        try:\n"
    "            return sum(cuda.memory_reserved(d) for d in range(cuda.device_count()))\n"
    "        except Exception:\n"
    "            return 0\n"
    "    before = held()\n"
    "    cuda.empty_cache()\n"
    "    return before - held()\n"
    "\n"
    "def cupy(module, devices):\n"
    "    if not devices or not hasattr(module, 'get_default_memory_pool'):\n"
    "        return None\n"
    "    pool, pinned, given = module.get_default_memory_pool(), module.get_default_pinned_memory_pool(), 0\n"
    "    for device in devices:\n"
    "        if module.cuda.runtime.getDevice() != device:\n"
    "            module.cuda.runtime.setDevice(device)\n"
    "        before = pool.total_bytes()\n"
    "        pool.free_all_blocks()\n"
    "        given += before - pool.total_bytes()\n"
    "    pinned.free_all_blocks()\n"
    "    return given\n"
    "\n"
    "def drain(devices):\n"
    "    global busy, owner, registered\n"
    "    if owner != os.getpid():\n" /* a forked child has no drain under way, whatever its parent had */
    "        busy = _thread.allocate_lock()\n"
    "    present = [(f, sys.modules[f.__name__]) for f in (torch, cupy) if sys.modules.get(f.__name__)]\n"
    "    if not present or not busy.acquire(False):\n"
    "        return ''\n"
    "    parts = []\n"
    "    try:\n"
    "        owner = os.getpid()\n"
    "        if not getattr(sys, '_is_gil_enabled', lambda: True)():\n"
    "            return 'Python !it runs without a GIL'\n"
    "        register = getattr(sys.modules.get('threading'), '_register_atexit', None)\n"
    "        if register and not registered:\n"
    "            register(wait)\n"
    "            registered = True\n"
    "        for framework, module in present:\n"
    "            name = {'cupy': 'CuPy'}.get(framework.__name__, framework.__name__)\n"
    "            try:\n"
    "                given = framework(module, devices)\n"
    "                if given is not None:\n"
    "                    parts.append('%s %d' % (name, max(0, given)))\n"
    "            except BaseException as e:\n"
    "                said = '%s: %s' % (type(e).__name__, e)\n"
    "                parts.append('%s !%s' % (name, said.splitlines()[0][:120]))\n"
    "    finally:\n"
    "        busy.release()\n"
    "    return '\\n'.join(parts)\n";

static atomic_uint state; /* a futex */
enum { IDLE, RUNNING, OVER };
static struct vram_drained outcome; /* of the drain that is OVER */
static void (*when_done)(void);
static void *namespace; /* under the GIL; NULL: not defined yet */

static void *named(const struct link_map *map, const char *name) { return vram_elf_symbol(map, name); }

static int look_for_python(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct python *python = arg;
    struct link_map map = {.l_addr = info->dlpi_addr};
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            map.l_ld = (ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!map.l_ld || !named(&map, "Py_IsInitialized"))
        return 0;
#define X(ret, name, params)                                                                                           \
    if (!(python->name = (__typeof__(python->name))named(&map, #name)))                                                \
        return 0;
    PYTHON_FUNCTIONS(X)
#undef X
    python->finalizing = (__typeof__(python->finalizing))named(&map, "Py_IsFinalizing");
    if (!python->finalizing)
        python->finalizing = (__typeof__(python->finalizing))named(&map, "_Py_IsFinalizing");
    return python->Py_IsInitialized() != 0;
}

/* An interpreter that is up. Found by walking the loaded objects: dlsym would wait for a dlopen that another thread is in. */
static bool find_python(struct python *ret_python)
{
    *ret_python = (struct python){0};
    return dl_iterate_phdr(look_for_python, ret_python) == 1;
}

static bool at_its_end(const struct python *python)
{
    return !python->Py_IsInitialized() || (python->finalizing && python->finalizing());
}

/* The devices whose primary context is up: CuPy keeps a pool for each, and must not bring another one up. */
static void list_devices(char *text, size_t size)
{
    size_t at = 0;
    text[0] = 0;
    for (int d = 0; d < VRAM_DEVICES_MAX && vram_driver()->cuDevicePrimaryCtxGetState; d++) {
        unsigned flags;
        int active = 0;
        if (vram_life_primary_of(d) && VRAM_DRV(cuDevicePrimaryCtxGetState)(d, &flags, &active) == CUDA_SUCCESS && active && at + 4 < size)
            at += (size_t)snprintf(text + at, size - at, "%d,", d);
    }
}

/* This thread is prohibited from nothing by a capture of another one, and harms none. False: one has begun. */
static bool relax(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!vram_gate_enter())
        return false;
    if (vram_driver()->cuThreadExchangeStreamCaptureMode)
        VRAM_DRV(cuThreadExchangeStreamCaptureMode)(&mode);
    vram_gate_leave();
    return true;
}

/* With the GIL. */
static void run(const struct python *python, const char *devices)
{
    char call[256 + sizeof("result = drain([])")];
    void *result = NULL, *done = NULL;
    if (!namespace && (namespace = python->PyDict_New()) != NULL) {
        python->PyDict_SetItemString(namespace, "__builtins__", python->PyEval_GetBuiltins());
        if (!(done = python->PyRun_String(definitions, FILE_INPUT, namespace, namespace)))
            goto failed;
        python->Py_DecRef(done);
    }
    snprintf(call, sizeof(call), "result = drain([%s])", devices);
    if (!namespace || !(done = python->PyRun_String(call, FILE_INPUT, namespace, namespace)))
        goto failed;
    python->Py_DecRef(done);
    result = python->PyDict_GetItemString(namespace, "result");
    const char *text = result ? python->PyUnicode_AsUTF8(result) : NULL;
    if (!text)
        goto failed;
    snprintf(outcome.parts, sizeof(outcome.parts), "%s", text);
    return;
failed:
    python->PyErr_Clear();
    snprintf(outcome.parts, sizeof(outcome.parts), "Python !it could not run what drains torch and CuPy");
}

static void set_state(unsigned s)
{
    atomic_store(&state, s);
    vram_futex_wake(&state);
}

static void *drain(void *unused)
{
    struct python python;
    char devices[256];
    (void)unused;
    prctl(PR_SET_NAME, "vramshim drain", 0, 0, 0);
    for (;;) {
        while (!vram_capture_wait_none(CAPTURE_POLL_MS))
            if (vram_heap_is_exiting())
                return NULL;
        if (!find_python(&python) || at_its_end(&python) || vram_heap_is_exiting())
            break;
        list_devices(devices, sizeof(devices));
        if (!relax())
            continue;
        uint64_t start = vram_now();
        int gil = python.PyGILState_Ensure(); /* at the interpreter's end it does not come back */
        outcome.gil_ns = vram_now() - start;
        bool late = vram_capture_active();
        if (!late)
            run(&python, devices);
        python.PyGILState_Release(gil);
        if (!late)
            break;
    }
    void (*done)(void) = when_done;
    set_state(OVER);
    done();
    return NULL;
}

bool vram_drain_start(void (*done)(void))
{
    struct python python;
    unsigned idle = IDLE;
    if (!vram_options->drain || !find_python(&python) || at_its_end(&python) ||
        !atomic_compare_exchange_strong(&state, &idle, RUNNING))
        return false;
    outcome = (struct vram_drained){0};
    when_done = done;
    if (vram_thread_start(drain, NULL) == 0)
        return true;
    atomic_store(&state, IDLE);
    return false;
}

bool vram_drain_take(struct vram_drained *ret_drained, unsigned timeout_ms)
{
    uint64_t end = vram_now() + (uint64_t)timeout_ms * 1000000, now;
    while (atomic_load(&state) == RUNNING && (now = vram_now()) < end)
        vram_futex_wait(&state, RUNNING, end - now);
    if (atomic_load(&state) != OVER)
        return false;
    *ret_drained = outcome;
    atomic_store(&state, IDLE);
    return true;
}
