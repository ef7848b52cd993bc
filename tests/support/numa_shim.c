/* For LD_PRELOAD: a machine of two memory nodes with a CPU each, as ggml looks for them, on which
 * this process is on the second. Appends to the file of NUMA_SHIM_LOG, as one hexadecimal number a
 * line, the CPUs that each thread is put on, and leaves it where it is. */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { N_NODES = 2 };

#define NODES "/sys/devices/system/node/node"
#define CPUS "/sys/devices/system/cpu/cpu"

static int is_there(const char * path) {
    unsigned node = 0, cpu = 0;
    if (sscanf(path, NODES "%u/cpu%u", &node, &cpu) == 2) {
        return node < N_NODES && node == cpu;
    }
    return (sscanf(path, NODES "%u", &node) == 1 || sscanf(path, CPUS "%u", &node) == 1) &&
           node < N_NODES;
}

int stat(const char * restrict path, struct stat * restrict out) {
    if (strncmp(path, NODES, strlen(NODES)) != 0 && strncmp(path, CPUS, strlen(CPUS)) != 0) {
        return fstatat(AT_FDCWD, path, out, 0);
    }
    if (is_there(path)) {
        return fstatat(AT_FDCWD, "/", out, 0);
    }
    errno = ENOENT;
    return -1;
}

int getcpu(unsigned * cpu, unsigned * node) {
    *cpu = *node = 1;
    return 0;
}

int pthread_getaffinity_np(pthread_t thread, size_t size, cpu_set_t * cpus) {
    (void)thread;
    CPU_ZERO_S(size, cpus);
    CPU_SET_S(0, size, cpus);
    return 0;
}

int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t * cpus) {
    (void)thread;
    unsigned mask = 0;
    for (unsigned i = 0; i < 8 * sizeof mask && i < 8 * size; ++i) {
        mask |= CPU_ISSET_S(i, size, cpus) ? 1u << i : 0;
    }
    FILE * log = fopen(getenv("NUMA_SHIM_LOG"), "a");
    if (log == NULL) {
        return errno;
    }
    fprintf(log, "%x\n", mask);
    return fclose(log);
}
