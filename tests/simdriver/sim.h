/*
 * What a test may ask of, and do to, the simulated driver beyond the CUDA API.
 *
 * Reached by linking against libcuda.so.1 of this folder, or by dlsym from a program that must also run on the real
 * driver. Every function may be called at any time from any thread, also before cuInit; none of them is counted as a
 * call, waits, or takes part in happens-before. Entries are named as exported ("cuMemAlloc_v2", "cuStreamQuery_ptsz").
 */
#ifndef SIMDRIVER_SIM_H
#define SIMDRIVER_SIM_H

#include <stddef.h>
#include <stdint.h>

/* Calls of an entry that reached the driver since the start or the last reset; 0 for a name that it does not have. */
unsigned long sim_calls(const char *entry);
/* Of those, the ones made while any stream of the process was capturing (the begin itself does not count). */
unsigned long sim_calls_during_capture(const char *entry);
/* All calls of all entries; lookups (cuGetProcAddress*) left out. */
unsigned long sim_calls_total(void);
/* Frees that the driver refused with INVALID_VALUE: double, interior or unknown. A shim should forward none twice. */
unsigned long sim_refused_frees(void);
void sim_reset_counters(void);

/*
 * Let calls fail without doing anything: the nth call of the entry from now on (1 is the next one), and the count - 1
 * after it, answer `code`. A later call for the same entry replaces it; count 0 removes it. Returns 0, or -1 for an
 * unknown entry.
 */
int sim_fail(const char *entry, unsigned long nth, unsigned long count, int code);

/*
 * Run callback(entry, arg) at the start of each call of the entry, on the calling thread and without a lock held, so
 * that it may call the driver itself (its own calls of that entry do not nest). NULL removes it. Returns 0 or -1.
 */
typedef void (*sim_callback)(const char *entry, void *arg);
int sim_on_call(const char *entry, sim_callback callback, void *arg);

/* Number of captures that were begun and not ended yet. */
int sim_capturing(void);
/* Work items that were submitted and are not complete. Asking does not make anything observed. */
unsigned long sim_pending(void);
/* Bytes taken on a device, as cuMemGetInfo sees them. */
uint64_t sim_used(int device);
/* Whether each symbol that the driver looked up in itself during cuInit came back as its own address; -1 before. */
int sim_self_lookup_ok(void);
/* Whether addr is inside a range that the driver has allocated now. */
int sim_is_allocated(uint64_t addr);

/*
 * The judge. Note an allocation after it came back, and a free just before it is made: the judge then knows what the
 * program owns, whatever a shim keeps from the driver. Noting nothing is fine: then the driver's own view counts.
 */
void sim_note_alloc(uint64_t ptr, size_t size);
void sim_note_free(uint64_t ptr);
/* Hazards found so far (each distinct line once), and their text: NULL past the end, else valid until cleared. */
unsigned int sim_hazards(void);
const char *sim_hazard_text(unsigned int index);
void sim_clear_hazards(void);

#endif
