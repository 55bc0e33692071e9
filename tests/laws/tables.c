/* What loaders of the driver have: data under the names of its entries. */
#define VRAM_HOOK(name, parameters, arguments) void *name = (void *)1;
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
