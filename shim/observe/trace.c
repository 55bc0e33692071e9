#include "observe/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/cancel.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/proc.h"
#include "base/sandbox.h"
#include "base/say.h"
#include "base/text.h"
#include "config/options.h"
#include "heap/heap.h"
#include "heap/life.h"
#include "observe/file.h"

enum { LINE_BYTES = 128 /* at most */, SECOND = 1000000 /* us */ };

bool vram_trace_at_work;

/* All under TRACE. */
static char buffer[64 * 1024];
static struct vram_text lines = VRAM_TEXT(buffer);
static uint64_t began; /* time of the first line, ns; 0: there is none */
static struct vram_file file;
static bool sandbox_told;

static bool has_room(void) { return lines.cap - lines.len > LINE_BYTES; }

static void add_line(const char *action, CUdeviceptr ptr, size_t size, uint32_t tid)
{
    uint64_t now = vram_now();
    VRAM_CHECK(has_room());
    if (!began) {
        began = now;
        vram_text_add(&lines, "Thread,Time,Action,Pointer,Size,Stream\n");
    }
    uint64_t us = (now - began) / 1000, s = us / SECOND;
    vram_text_add(&lines, "%" PRIu32 ",%02" PRIu64 ":%02u:%02u.%06u,%s,0x%llx,%zu,0\n", tid, s / 3600, (unsigned)(s / 60 % 60),
                  (unsigned)(s % 60), (unsigned)(us % SECOND), action, ptr, size);
}

/* A program that has sandboxed itself opens no file: what is written from there on goes where the rest is said. */
static int write_to_stderr(bool instead)
{
    if (instead && !sandbox_told)
        vram_say("this program has sandboxed itself, so no file is opened: the trace for %s goes on here",
                 vram_options->trace.pattern);
    sandbox_told |= instead;
    return vram_say_raw(lines.buf, lines.len);
}

/* 0, or a negative errno: then it was the last. */
static int write_lines(void)
{
    const struct vram_output *to = &vram_options->trace;
    bool instead = to->kind == VRAM_OUTPUT_PATH && vram_sandboxed();
    int r = instead || to->kind == VRAM_OUTPUT_STDERR ? write_to_stderr(instead)
                                                      : vram_file_append(&file, to, lines.buf, lines.len);
    lines.len = 0;
    if (r < 0)
        __atomic_store_n(&vram_trace_at_work, false, __ATOMIC_RELAXED);
    return r;
}

/* Not under TRACE: whoever failed is the last who has used the file. */
static void told(int r)
{
    if (r < 0 && vram_options->trace.kind == VRAM_OUTPUT_STDERR)
        vram_say("cannot write the trace to standard error (%s): it ends here", strerror(-r));
    else if (r < 0)
        vram_say("cannot write the trace to %s (%s): it ends here%s", file.path, file.why, file.begun ? ", within a line" : "");
}

static void add(const char *action, CUdeviceptr ptr, size_t size)
{
    const uint32_t tid = vram_site_here(0).tid;
    int cancelling = vram_cancel_hold(), r = 0; /* cancelled in between, this thread would leave with the lock */
    vram_lock(VRAM_RANK_TRACE);
    if (vram_trace_on()) {
        add_line(action, ptr, size, tid);
        if (!has_room())
            r = write_lines();
    }
    vram_unlock(VRAM_RANK_TRACE);
    told(r);
    vram_cancel_give_back(cancelling);
}

void vram_trace_allocated(CUresult r, CUdeviceptr ptr, size_t size)
{
    if (r == CUDA_SUCCESS)
        add("allocate", ptr, size);
    else
        add("allocate failure", 0, size);
}

void vram_trace_freeing(CUdeviceptr ptr)
{
    size_t size = vram_block_live_size(ptr);
    if (size)
        add("free", ptr, size);
}

void vram_trace_write(void)
{
    int saved = errno, r = 0;
    if (!vram_trace_on() || !vram_proc_is_recorded())
        return;
    int cancelling = vram_cancel_hold();
    if (vram_lock_at_exit(VRAM_RANK_TRACE)) {
        if (vram_trace_on() && lines.len)
            r = write_lines();
        vram_unlock(VRAM_RANK_TRACE);
    }
    told(r);
    vram_cancel_give_back(cancelling);
    errno = saved;
}

void vram_trace_start(void)
{
    lines.len = 0;
    began = 0;
    sandbox_told = false;
    __atomic_store_n(&vram_trace_at_work, vram_options->trace.kind != VRAM_OUTPUT_NONE, __ATOMIC_RELAXED);
}
