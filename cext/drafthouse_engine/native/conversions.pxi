# Python values to C and back.

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t

import numpy as np

from drafthouse_engine import errors


@cython.final
cdef class Buffer:
    """Memory of an array, held as long as this object lives."""

    cdef Py_buffer view

    def __cinit__(self, array, bint is_writable=False):
        flags = PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if is_writable else 0)
        PyObject_GetBuffer(array, &self.view, flags)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


@cython.final
cdef class Strings:
    """Texts as an array of C strings, valid as long as this object lives."""

    cdef list encoded
    cdef const char ** pointers

    def __cinit__(self, texts, str name):
        self.encoded = [encode(text, name) for text in texts]
        self.pointers = <const char **>PyMem_Malloc(max(1, len(self.encoded)) * sizeof(char *))
        if self.pointers is NULL:
            raise MemoryError
        for i, text in enumerate(self.encoded):
            self.pointers[i] = <const char *>(<bytes>text)

    def __dealloc__(self):
        PyMem_Free(self.pointers)


cdef object span_array(spans):
    """Returns spans as an array of spec_span."""
    given = np.asarray(spans)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"spans must be integers, not {given.dtype}")
    if given.size and given.min() < 0:
        raise errors.InvalidArgument("a span begins before the text")
    return np.array(given.reshape(-1, 2), np.uintp, order="C")


cdef bytes encode_text(text, str name):
    if not isinstance(text, str):
        raise TypeError(f"{name} must be str, not {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(
            f"{name} has a lone surrogate at index {error.start}, which UTF-8 cannot hold"
        ) from None


cdef bytes encode(text, str name):
    encoded = encode_text(text, name)
    if b"\0" in encoded:
        raise errors.InvalidArgument(f"{name} has a NUL character at byte {encoded.index(0)}")
    return encoded


cdef int32_t int32_of(value, str name) except? -1:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    number = value.__index__()
    if not INT32_MIN <= number <= INT32_MAX:
        raise errors.InvalidArgument(f"{name} is {number}, which does not fit 32 bits")
    return number


cpdef object int32_array(values, str name):
    """Returns a copy of integers in one dimension: another thread may write to the caller's.

    Args:
        values: a sequence or an array.
        name: of the argument, for what is raised.

    Shape:
        [n] int32.

    Raises:
        InvalidArgument: there is another number of dimensions, or a value does not fit 32 bits.
        TypeError: they are no integers.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{name} must have one dimension, not {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers of 32 bits, not {array.dtype}")
    if array.dtype != np.int32 and not (INT32_MIN <= array.min() and array.max() <= INT32_MAX):
        raise errors.InvalidArgument(f"{name} has values that do not fit 32 bits")
    return np.array(array, np.int32, order="C")


cdef object array_of(const void * source, size_t n, dtype):
    """A read-only copy of n elements in C memory."""
    if n == 0:
        return np.empty(0, dtype)
    return np.frombuffer(PyBytes_FromStringAndSize(<const char *>source, n * dtype.itemsize), dtype)


_int32 = np.dtype(np.int32)
_float32 = np.dtype(np.float32)
