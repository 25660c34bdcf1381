/* Module functions on raw memory, and the parsing of region lists. */
#include "binding.h"

#include "copy.h"

#include <string.h>

int
convert_u64(PyObject* object, void* result) {
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%R is not in [0, 2**64)", object);
        }
        return 0;
    }
    *(uint64_t*)result = value;
    return 1;
}

uint64_t*
word_at(uint64_t address) {
    if (address == 0 || address % sizeof(uint64_t) != 0) {
        PyErr_Format(PyExc_ValueError, "word address 0x%llx is not a multiple of 8 above 0",
                     (unsigned long long)address);
        return NULL;
    }
    return (uint64_t*)(uintptr_t)address;
}

/* ---- region lists ---- */

static bool
is_int64(const Py_buffer* view) {
    const char* format = view->format != NULL ? view->format : "B";
    format += format[0] == '<' || format[0] == '=' || format[0] == '@';
    return view->itemsize == 8 && (strcmp(format, "l") == 0 || strcmp(format, "q") == 0);
}

/* A missing list leaves the view empty. */
static bool
get_int64s(PyObject* object, const char* name, Py_buffer* view) {
    *view = (Py_buffer){0};
    if (object == NULL) {
        return true;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        return false;
    }
    if (!is_int64(view)) {
        PyErr_Format(PyExc_TypeError, "%s must be int64, not of format '%s'", name,
                     view->format != NULL ? view->format : "B");
        PyBuffer_Release(view);
        return false;
    }
    return true;
}

static bool
raise_regions(regions_status_t status) {
    switch (status) {
    case REGIONS_OK:
        return true;
    case REGIONS_NO_MEMORY:
        PyErr_NoMemory();
        return false;
    case REGIONS_INVALID:
        break;
    }
    PyErr_SetString(PyExc_ValueError,
                    "regions have a negative length, a null address, or too many bytes");
    return false;
}

static bool
make_regions(const Py_buffer* sources, const Py_buffer* destinations, const Py_buffer* lengths,
             regions_t* regions) {
    if ((sources->obj != NULL && sources->len != lengths->len) ||
        (destinations->obj != NULL && destinations->len != lengths->len)) {
        PyErr_SetString(PyExc_ValueError, "region lists differ in length");
        return false;
    }
    return raise_regions(regions_create(regions, sources->buf, destinations->buf, lengths->buf,
                                        (size_t)lengths->len / sizeof(int64_t)));
}

bool
parse_regions(PyObject* sources, PyObject* destinations, PyObject* lengths, regions_t* regions) {
    Py_buffer views[3] = {{0}};
    bool is_made = get_int64s(sources, "sources", &views[0]) &&
                   get_int64s(destinations, "destinations", &views[1]) &&
                   get_int64s(lengths, "lengths", &views[2]) &&
                   make_regions(&views[0], &views[1], &views[2], regions);
    for (int i = 0; i < 3; i++) {
        PyBuffer_Release(&views[i]);
    }
    return is_made;
}

/* ---- functions ---- */

static PyObject*
read_word(PyObject* module, PyObject* object) {
    (void)module;
    uint64_t address = 0;
    const uint64_t* word = convert_u64(object, &address) ? word_at(address) : NULL;
    if (word == NULL) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(__atomic_load_n(word, __ATOMIC_ACQUIRE));
}

static PyObject*
write_word(PyObject* module, PyObject* args) {
    (void)module;
    uint64_t address = 0;
    uint64_t value = 0;
    if (!PyArg_ParseTuple(args, "O&O&:write_word", convert_u64, &address, convert_u64, &value)) {
        return NULL;
    }
    uint64_t* word = word_at(address);
    if (word == NULL) {
        return NULL;
    }
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject*
copy_now(PyObject* module, PyObject* args, PyObject* kwargs) {
    (void)module;
    static char* keywords[] = {"sources", "destinations", "lengths", NULL};
    PyObject* sources = NULL;
    PyObject* destinations = NULL;
    PyObject* lengths = NULL;
    regions_t regions;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:copy_now", keywords, &sources,
                                     &destinations, &lengths) ||
        !parse_regions(sources, destinations, lengths, &regions)) {
        return NULL;
    }
    cursor_t cursor = {0};
    size_t copied = 0;
    Py_BEGIN_ALLOW_THREADS copied = regions_copy(&regions, &cursor, SIZE_MAX);
    copy_publish();
    Py_END_ALLOW_THREADS regions_destroy(&regions);
    return PyLong_FromSize_t(copied);
}

PyMethodDef memory_methods[] = {
    {"read_word", read_word, METH_O, "read_word(address): load-acquire a uint64."},
    {"write_word", write_word, METH_VARARGS, "write_word(address, value): store-release a uint64."},
    {"copy_now", (PyCFunction)(void (*)(void))copy_now, METH_VARARGS | METH_KEYWORDS,
     "copy_now(sources, destinations, lengths): copy on this thread; returns the bytes copied."},
    {NULL, NULL, 0, NULL},
};
