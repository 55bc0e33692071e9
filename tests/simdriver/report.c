/* The exit report (SIMCUDA_REPORT). */
#include "entry.h"
#include "judge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A destructor of the library: it runs after the exit handlers, and after the destructors of what is linked to us. */
__attribute__((destructor)) static void report(void)
{
    sim_lock();
    if (!sim.used || sim.forked || !sim.config.report) {
        sim_unlock();
        return;
    }
    FILE *f = !strcmp(sim.config.report, "stderr") ? stderr : fopen(sim.config.report, "we");
    if (f) {
        unsigned long n;
        const char *name;
        for (size_t i = 0; (name = sim_entry_name(i, &n)); i++)
            if (n)
                fprintf(f, "calls %s %lu\n", name, n);
        fprintf(f, "hazards %u\n", sim_judge_count());
        for (unsigned int i = 0; i < sim_judge_count(); i++)
            fprintf(f, "hazard %s\n", sim_judge_text(i));
        for (int d = 0; d < sim.config.devices; d++)
            fprintf(f, "used %d %llu\n", d, (unsigned long long)sim.device[d].used);
        if (f != stderr)
            fclose(f);
    } else {
        fprintf(stderr, "simdriver: bad value SIMCUDA_REPORT=%s\n", sim.config.report);
    }
    sim_unlock();
}
