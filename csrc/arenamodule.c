#include "binding.h"

#include "arena.h"

#include <errno.h>
#include <string.h>

typedef struct {
    PyObject_HEAD arena_t arena;
    bool is_open;
    Py_ssize_t num_views; /* buffers handed out and not yet released */
} arena_object_t;

static arena_object_t*
arena_of(PyObject* self) {
    return (arena_object_t*)self;
}

/* Raises and returns NULL when it is closed. */
static arena_t*
open_arena(PyObject* self) {
    if (!arena_of(self)->is_open) {
        PyErr_SetString(PyExc_ValueError, "the arena is closed");
        return NULL;
    }
    return &arena_of(self)->arena;
}

static PyObject*
raise_status(arena_status_t status) {
    switch (status) {
    case ARENA_TOO_SMALL:
        PyErr_SetString(PyExc_ValueError, "the memory file is smaller than nbytes");
        return NULL;
    case ARENA_UNSEALED:
        PyErr_SetString(PyExc_ValueError, "the memory file is not sealed against shrinking");
        return NULL;
    case ARENA_HUGE_PAGES:
        PyErr_SetString(PyExc_ValueError, "the memory file is not of ordinary pages");
        return NULL;
    case ARENA_OK:
    case ARENA_ERRNO:
        break;
    }
    return PyErr_SetFromErrno(PyExc_OSError);
}

static bool
parse_nbytes(Py_ssize_t nbytes) {
    if (nbytes <= 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must be above 0, got %zd", nbytes);
        return false;
    }
    return true;
}

static PyObject*
arena_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"nbytes", "huge_pages", "page_lock", "cuda_register", NULL};
    Py_ssize_t nbytes = 0;
    int huge_pages = 1;
    int page_lock = 0;
    int cuda_register = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|$ppp:Arena", keywords, &nbytes, &huge_pages,
                                     &page_lock, &cuda_register) ||
        !parse_nbytes(nbytes)) {
        return NULL;
    }
    arena_object_t* self = (arena_object_t*)object_new(type);
    if (self == NULL) {
        return NULL;
    }
    arena_options_t options = {huge_pages != 0, page_lock != 0, cuda_register != 0};
    arena_status_t status = ARENA_OK;
    Py_BEGIN_ALLOW_THREADS status = arena_create(&self->arena, (size_t)nbytes, options);
    Py_END_ALLOW_THREADS self->is_open = status == ARENA_OK;
    if (!self->is_open) {
        raise_status(status);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject*)self;
}

static PyObject*
arena_attach_method(PyObject* type, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"fd", "nbytes", NULL};
    int fd = -1;
    Py_ssize_t nbytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in:attach", keywords, &fd, &nbytes) ||
        !parse_nbytes(nbytes)) {
        return NULL;
    }
    arena_object_t* self = (arena_object_t*)object_new((PyTypeObject*)type);
    if (self == NULL) {
        return NULL;
    }
    arena_status_t status = arena_attach(&self->arena, fd, (size_t)nbytes);
    self->is_open = status == ARENA_OK;
    if (!self->is_open) {
        raise_status(status);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject*)self;
}

static void
destroy(arena_object_t* self) {
    if (!self->is_open) {
        return;
    }
    self->is_open = false;
    Py_BEGIN_ALLOW_THREADS arena_destroy(&self->arena);
    Py_END_ALLOW_THREADS
}

static void
arena_dealloc(PyObject* self) {
    destroy(arena_of(self));
    object_free(self);
}

static PyObject*
arena_close_method(PyObject* self, PyObject* unused) {
    (void)unused;
    if (arena_of(self)->num_views > 0) {
        return PyErr_Format(PyExc_BufferError, "%zd views of the arena are alive",
                            arena_of(self)->num_views);
    }
    destroy(arena_of(self));
    Py_RETURN_NONE;
}

static PyObject*
arena_fileno_method(PyObject* self, PyObject* unused) {
    (void)unused;
    const arena_t* arena = open_arena(self);
    return arena != NULL ? PyLong_FromLong(arena->fd) : NULL;
}

static PyObject*
arena_prefault_method(PyObject* self, PyObject* object) {
    arena_t* arena = open_arena(self);
    uint64_t upto = 0;
    if (arena == NULL || !convert_u64(object, &upto)) {
        return NULL;
    }
    errno = arena_prefault(arena, (size_t)upto);
    if (errno != 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject*
arena_view_method(PyObject* self, PyObject* args) {
    uint64_t offset = 0;
    uint64_t nbytes = 0;
    const arena_t* arena = open_arena(self);
    if (arena == NULL ||
        !PyArg_ParseTuple(args, "O&O&:view", convert_u64, &offset, convert_u64, &nbytes)) {
        return NULL;
    }
    if (offset > arena->nbytes || nbytes > arena->nbytes - offset) {
        return PyErr_Format(PyExc_ValueError, "[%llu, +%llu) is outside of an arena of %zu bytes",
                            (unsigned long long)offset, (unsigned long long)nbytes, arena->nbytes);
    }
    PyObject* whole = PyMemoryView_FromObject(self);
    PyObject* view = whole != NULL ? PySequence_GetSlice(whole, (Py_ssize_t)offset,
                                                         (Py_ssize_t)(offset + nbytes))
                                   : NULL;
    Py_XDECREF(whole);
    return view;
}

static PyObject*
arena_report_method(PyObject* self, PyObject* unused) {
    (void)unused;
    arena_t* arena = open_arena(self);
    if (arena == NULL) {
        return NULL;
    }
    return Py_BuildValue("{s:N,s:s,s:s,s:s,s:N}",                                         //
                         "memory_file", PyUnicode_FromFormat("%zu bytes", arena->nbytes), //
                         "huge_pages", arena->huge_pages,                                 //
                         "page_lock", arena->page_lock,                                   //
                         "cuda_register", arena->cuda_register,                           //
                         "prefault",
                         PyUnicode_FromFormat("%zu of %zu bytes", atomic_load(&arena->touched),
                                              atomic_load(&arena->prefault_target)));
}

static PyObject*
arena_get_address(PyObject* self, void* unused) {
    (void)unused;
    const arena_t* arena = open_arena(self);
    return arena != NULL ? PyLong_FromVoidPtr(arena->address) : NULL;
}

static PyObject*
arena_get_nbytes(PyObject* self, void* unused) {
    (void)unused;
    const arena_t* arena = open_arena(self);
    return arena != NULL ? PyLong_FromSize_t(arena->nbytes) : NULL;
}

static PyObject*
arena_get_touched(PyObject* self, void* unused) {
    (void)unused;
    const arena_t* arena = open_arena(self);
    return arena != NULL ? PyLong_FromSize_t(atomic_load(&arena->touched)) : NULL;
}

static PyObject*
arena_get_refusal(PyObject* self, void* unused) {
    (void)unused;
    const arena_t* arena = open_arena(self);
    int error = arena != NULL ? atomic_load(&arena->prefault_error) : 0;
    return arena != NULL ? PyUnicode_FromString(error != 0 ? strerror(error) : "") : NULL;
}

static int
arena_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    const arena_t* arena = open_arena(self);
    if (arena == NULL ||
        PyBuffer_FillInfo(view, self, arena->address, (Py_ssize_t)arena->nbytes, 0, flags) < 0) {
        return -1;
    }
    arena_of(self)->num_views++;
    return 0;
}

static void
arena_releasebuffer(PyObject* self, Py_buffer* view) {
    (void)view;
    arena_of(self)->num_views--;
}

static PyMethodDef arena_methods[] = {
    {"attach", (PyCFunction)(void (*)(void))arena_attach_method,
     METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     "attach(fd, nbytes): map a peer's memory file; it must be sealed against shrinking."},
    {"fileno", arena_fileno_method, METH_NOARGS, "fileno(): the memory file."},
    {"prefault", arena_prefault_method, METH_O,
     "prefault(upto_bytes): let a background thread touch the first pages; returns at once."},
    {"view", arena_view_method, METH_VARARGS,
     "view(offset, nbytes): a writable memoryview that keeps the mapping alive."},
    {"report", arena_report_method, METH_NOARGS, "report(): how each step went, in words."},
    {"close", arena_close_method, METH_NOARGS,
     "close(): unmap; idempotent; BufferError while views are alive."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef arena_getset[] = {
    {"address", arena_get_address, NULL, "The address of the first byte.", NULL},
    {"nbytes", arena_get_nbytes, NULL, "The size.", NULL},
    {"touched_bytes", arena_get_touched, NULL,
     "How many of the first bytes the background thread has touched.", NULL},
    {"refusal", arena_get_refusal, NULL, "Why the system gives it no page now, or \"\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot arena_slots[] = {
    {Py_tp_doc, "Arena(nbytes, *, huge_pages=True, page_lock=False, cuda_register=False): "
                "host memory that peers can map."},
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_getset},
    {Py_bf_getbuffer, arena_getbuffer},
    {Py_bf_releasebuffer, arena_releasebuffer},
    {0, NULL},
};

PyType_Spec arena_spec = {
    .name = "mempool._native.Arena",
    .basicsize = sizeof(arena_object_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = arena_slots,
};
