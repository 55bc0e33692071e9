/* Where an interposed dlsym goes on (laws 2, 3, 7). */
#ifndef VRAM_INTERPOSE_LOOKUP_H
#define VRAM_INTERPOSE_LOOKUP_H

/* The function that the trampoline (dlsym.S) jumps to with the caller's arguments: the real dlsym, or for a name of ours on
 * an explicit handle vram_dlsym_substitute. May run before any constructor, inside a malloc that is looking itself up: no
 * allocation, no lock; and it is built without a sanitizer, whose runtime looks itself up before it is ready. */
void *vram_dlsym_route(void *handle, const char *name, const void *caller);

/* dlsym, with the answer replaced where it is an entry that we hook. */
void *vram_dlsym_substitute(void *handle, const char *name);

#endif
