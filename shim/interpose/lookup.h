/* Where an interposed dlsym goes on. Called by the trampoline in dlsym.S only. */
#ifndef VRAM_INTERPOSE_LOOKUP_H
#define VRAM_INTERPOSE_LOOKUP_H

/* The function that the trampoline jumps to with the caller's arguments: the real dlsym, or for a name of ours on an
 * explicit handle one that substitutes. May run before any constructor, inside a malloc: no allocation, no lock. */
void *vram_dlsym_route(void *handle, const char *name, const void *caller);

#endif
