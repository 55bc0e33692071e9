#include "machine.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

static sem_t turns[MAX_THREADS];
/* In turns no thread ends early: it takes its own default stream along. And none starts late: what it makes current first
 * may have ended in somebody's turn. */
static pthread_barrier_t all;

void see(struct thread *t, const char *what, uint64_t value)
{
    fprintf(t->out, " %s=%llu", what, (unsigned long long)value);
}

static void step(struct thread *t, size_t i)
{
    const struct line *l = &t->program->lines[i];
    fprintf(t->out, "%zu %u %s:", i + 1, t->index, ops[l->op].name);
    machine_step(t, l);
    fputc('\n', t->out);
}

static void *work(void *arg)
{
    struct thread *t = arg;
    const struct program *p = t->program;
    if (p->turns) {
        for (size_t i = 0; i < p->count; i++) {
            if (p->lines[i].thread != t->index)
                continue;
            sem_wait(&turns[t->index]);
            step(t, i);
            if (i + 1 < p->count)
                sem_post(&turns[p->lines[i + 1].thread]);
        }
        pthread_barrier_wait(&all);
    } else {
        for (size_t i = 0; i < p->count; i++)
            if (p->lines[i].thread == t->index)
                step(t, i);
    }
    return NULL;
}

static void *begin(void *arg)
{
    machine_start(arg);
    if (((struct thread *)arg)->program->turns)
        pthread_barrier_wait(&all);
    return work(arg);
}

bool program_run(const struct program *p)
{
    struct thread *threads = calloc(p->threads, sizeof *threads);
    struct world *worlds = calloc(p->threads, sizeof *worlds);
    pthread_t ids[MAX_THREADS];
    unsigned long wrong = 0;
    if (!threads || !worlds)
        abort();
    for (unsigned i = 0; i < p->threads; i++) {
        sem_init(&turns[i], 0, 0);
        threads[i] = (struct thread){.index = i, .program = p, .world = &worlds[p->turns ? 0 : i]};
        threads[i].out = open_memstream(&threads[i].text, &threads[i].text_size);
    }
    if (p->turns)
        machine_start(&threads[0]); /* before the others look at the world that they share */
    pthread_barrier_init(&all, NULL, p->threads);
    if (p->count)
        sem_post(&turns[p->lines[0].thread]);
    for (unsigned i = 0; i < p->threads; i++)
        if (pthread_create(&ids[i], NULL, begin, &threads[i]) != 0)
            abort();
    for (unsigned i = 0; i < p->threads; i++) {
        pthread_join(ids[i], NULL);
        fclose(threads[i].out);
        fputs(threads[i].text, stdout);
        wrong += threads[i].wrong;
        free(threads[i].text);
    }
    machine_held(p, worlds, p->threads);
    free(threads);
    free(worlds);
    unsigned hazards = sim_hazards();
    printf("%lu wrong contents, %u hazards\n", wrong, hazards);
    for (unsigned i = 0; i < hazards && i < 10; i++)
        fprintf(stderr, "hazard: %s\n", sim_hazard_text(i));
    return !wrong && !hazards;
}
