/* drafthouse_engine._cpu: which level of x86-64 this machine's CPU has. A module of its own,
 * compiled for any CPU: what is asked decides which of the wheel's libraries may be loaded. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* With a v3, as of Intel's Haswell and AMD's Zen, come F16C, LZCNT and MOVBE; the compiler's
 * run-time library asks the system, too, whether it saves the wide registers. */
static long cpu_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("ssse3") || !__builtin_cpu_supports("sse4.1") ||
        !__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("popcnt")) {
        return 1;
    }
    if (!__builtin_cpu_supports("avx") || !__builtin_cpu_supports("avx2") ||
        !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") ||
        !__builtin_cpu_supports("fma")) {
        return 2;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl")) {
        return 3;
    }
    return 4;
#else
    return 0;
#endif
}

static PyObject * level(PyObject * self, PyObject * unused) {
    (void)self;
    (void)unused;
    return PyLong_FromLong(cpu_level());
}

static PyMethodDef methods[] = {
    {"level", level, METH_NOARGS,
     "Returns the CPU's level of x86-64, 1 to 4; 0 on other architectures."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "drafthouse_engine._cpu", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) {
    return PyModule_Create(&module);
}
