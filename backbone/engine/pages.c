// The loader maps the whole file, touches every page of it, and offers each weight from there. While it
// offers one, and only then, the weight's pages are certain to be what they seem: afterwards llama.cpp
// unmaps what lies at a file's edges, and the address may soon be another thread's stack.

#include "pages.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__

// One line of /proc/self/maps (proc_pid_maps(5)): start-end perms offset device inode path
static bool read_mapping(FILE *maps, uintptr_t *start, uintptr_t *end, bool *shared_file) {
    char line[128], perms[5];
    uint64_t inode;
    if (!fgets(line, sizeof line, maps)) return false;
    int fields = sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*x %*x:%*x %" SCNu64, start, end, perms,
                        &inode);
    // The pages of a shared mapping are the file's own, whoever wrote to them: nothing is lost by letting
    // go. A private one may hold pages of its own, also where it can no longer be written (RELRO).
    *shared_file = fields == 4 && perms[3] == 's' && inode != 0;
    for (size_t length = 0; line[length]; length++)
        if (line[length] == '\n') return fields == 4;
    for (int c = fgetc(maps); c != '\n' && c != EOF; c = fgetc(maps)) {
    } // a long path
    return fields == 4;
}

size_t pages_give_back(const void *data, size_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)data + page - 1) / page * page;
    uintptr_t last = ((uintptr_t)data + size) / page * page;
    if (last <= first) return 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return 0; // they stay: more memory, nothing wrong
    size_t given_back = 0;
    uintptr_t start, end;
    bool shared_file;
    while (read_mapping(maps, &start, &end, &shared_file) && start < last) {
        uintptr_t from = start > first ? start : first, to = end < last ? end : last;
        if (!shared_file || from >= to) continue;
        // A mapping of its own, read without its surroundings: a neighbour's fault stays outside.
        madvise((void *)from, to - from, MADV_RANDOM);
        if (!madvise((void *)from, to - from, MADV_DONTNEED)) given_back += to - from;
    }
    fclose(maps);
    return given_back;
}

#else // Darwin has no such list: the pages stay until the system wants them back

size_t pages_give_back(const void *data, size_t size) {
    (void)data;
    (void)size;
    return 0;
}

#endif
