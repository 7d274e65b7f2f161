// Give back memory in which the loader saw weights that the engine will never read.

#ifndef EXPERTSWARM_PAGES_H
#define EXPERTSWARM_PAGES_H

#include <stddef.h>

// Let go of the whole pages of [data, data + size), as far as they belong to a shared mapping of a
// file: reading them again reads the file. Returns how many bytes that were. All other memory is left as it is. The caller keeps the
// range mapped until this returns; nothing of it is remembered.
size_t pages_give_back(const void *data, size_t size);

#endif
