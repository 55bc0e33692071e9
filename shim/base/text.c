#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "vramshim/quote.h"

void vram_text_add(struct vram_text *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(t->buf + t->len, t->cap - t->len, fmt, ap);
    va_end(ap);
    if (n < 0)
        return;
    t->len = (size_t)n < t->cap - t->len ? t->len + (size_t)n : t->cap - 1;
}

void vram_text_name(struct vram_text *t, const char *name)
{
    char quoted[VRAM_TEXT_NAME];
    vram_quote(quoted, sizeof(quoted), name, strlen(name));
    vram_text_add(t, "%s", quoted);
}

/* Tenths by integers: no floating point, so no libc path that may allocate. Rounded half up. */
static void tenths(struct vram_text *t, uint64_t value, uint64_t unit, const char *name)
{
    uint64_t whole = value / unit;
    uint64_t tenth = ((value % unit) * 10 + unit / 2) / unit;
    if (tenth == 10) {
        whole++;
        tenth = 0;
    }
    vram_text_add(t, "%llu.%llu %s", (unsigned long long)whole, (unsigned long long)tenth, name);
}

void vram_text_bytes(struct vram_text *t, uint64_t bytes)
{
    static const char *const names[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) {
        vram_text_add(t, "%u B", (unsigned)bytes);
        return;
    }
    int i = 0;
    while (i < 5 && bytes >> (10 * (i + 2)))
        i++;
    tenths(t, bytes, (uint64_t)1 << (10 * (i + 1)), names[i]);
}

void vram_text_duration(struct vram_text *t, uint64_t ns)
{
    const uint64_t second = 1000000000;
    if (ns < 1000000)
        vram_text_add(t, "%llu us", (unsigned long long)((ns + 500) / 1000));
    else if (ns < second)
        tenths(t, ns, 1000000, "ms");
    else if (ns < 120 * second)
        tenths(t, ns, second, "s");
    else if (ns < 7200 * second)
        vram_text_add(t, "%llu min", (unsigned long long)(ns / (60 * second)));
    else
        vram_text_add(t, "%llu h %llu min", (unsigned long long)(ns / (3600 * second)),
                      (unsigned long long)(ns / (60 * second) % 60));
}

void vram_text_count(struct vram_text *t, uint64_t n, const char *noun)
{
    vram_text_add(t, "%llu %s%s", (unsigned long long)n, noun, n == 1 ? "" : "s");
}
