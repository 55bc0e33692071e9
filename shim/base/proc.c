#include "base/proc.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/compiler.h"

atomic_uint *vram_proc_word;
static atomic_int recorded; /* 0 before load */
static VRAM_TLS bool renounced;

void vram_proc_record(void)
{
    if (!vram_proc_word) {
        void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page != MAP_FAILED && madvise(page, 4096, MADV_WIPEONFORK) == 0)
            vram_proc_word = page;
        else if (page != MAP_FAILED)
            munmap(page, 4096);
    }
    if (vram_proc_word)
        atomic_store(vram_proc_word, 1);
    atomic_store(&recorded, (int)syscall(SYS_getpid));
}

void vram_proc_renounce(void) { renounced = true; }

bool vram_proc_is_recorded(void) { return !renounced && atomic_load(&recorded) == (int)syscall(SYS_getpid); }

pid_t vram_proc_pid(void) { return atomic_load(&recorded); }
