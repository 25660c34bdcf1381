#include "binding.h"

#include "buddy.h"

typedef struct {
    PyObject_HEAD buddy_t* buddy;
} buddy_object_t;

static buddy_t*
buddy_of(PyObject* self) {
    return ((buddy_object_t*)self)->buddy;
}

static PyObject*
raise_status(buddy_status_t status) {
    switch (status) {
    case BUDDY_OK:
        Py_RETURN_NONE;
    case BUDDY_INVALID:
        PyErr_SetString(PyExc_ValueError, "min_block_bytes must be a power of two in [8, 2**31], "
                                          "and capacity_bytes hold 1 to 2**32 - 2 of them");
        return NULL;
    case BUDDY_NO_MEMORY:
        return PyErr_NoMemory();
    case BUDDY_FULL:
        PyErr_SetString(PyExc_MemoryError, "no run of free blocks is long enough");
        return NULL;
    case BUDDY_STALE:
        break;
    }
    PyErr_SetString(PyExc_ValueError, "not a live handle of this allocator");
    return NULL;
}

static PyObject*
buddy_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"capacity_bytes", "min_block_bytes", NULL};
    uint64_t capacity = 0;
    uint64_t min_block = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:Buddy", keywords, convert_u64, &capacity,
                                     convert_u64, &min_block)) {
        return NULL;
    }
    buddy_object_t* self = (buddy_object_t*)object_new(type);
    if (self == NULL) {
        return NULL;
    }
    /* Multiples of the golden ratio stay far apart: a handle of another allocator would be taken
     * for one of ours only after millions of frees of the same slot. */
    uint32_t salt = ++state_of((PyObject*)self)->num_buddies * UINT32_C(0x9e3779b1);
    buddy_status_t status = buddy_create(capacity, min_block, salt, &self->buddy);
    if (status != BUDDY_OK) {
        Py_DECREF(self);
        return raise_status(status);
    }
    return (PyObject*)self;
}

static void
buddy_dealloc(PyObject* self) {
    if (buddy_of(self) != NULL) {
        buddy_destroy(buddy_of(self));
    }
    object_free(self);
}

static PyObject*
buddy_alloc_method(PyObject* self, PyObject* object) {
    uint64_t nbytes = 0;
    buddy_handle_t handle = 0;
    if (!convert_u64(object, &nbytes)) {
        return NULL;
    }
    buddy_status_t status = buddy_alloc(buddy_of(self), nbytes, &handle);
    return status == BUDDY_OK ? PyLong_FromUnsignedLongLong(handle) : raise_status(status);
}

static PyObject*
buddy_free_method(PyObject* self, PyObject* object) {
    buddy_handle_t handle = 0;
    return convert_u64(object, &handle) ? raise_status(buddy_free(buddy_of(self), handle)) : NULL;
}

static bool
get_run(PyObject* self, PyObject* object, buddy_run_t* run) {
    buddy_handle_t handle = 0;
    if (!convert_u64(object, &handle)) {
        return false;
    }
    buddy_status_t status = buddy_run(buddy_of(self), handle, run);
    if (status != BUDDY_OK) {
        raise_status(status);
        return false;
    }
    return true;
}

static PyObject*
buddy_offset_method(PyObject* self, PyObject* object) {
    buddy_run_t run;
    return get_run(self, object, &run) ? PyLong_FromUnsignedLongLong(run.offset_bytes) : NULL;
}

static PyObject*
buddy_nbytes_method(PyObject* self, PyObject* object) {
    buddy_run_t run;
    return get_run(self, object, &run) ? PyLong_FromUnsignedLongLong(run.reserved_bytes) : NULL;
}

static PyObject*
buddy_stats_method(PyObject* self, PyObject* unused) {
    (void)unused;
    buddy_stats_t stats;
    buddy_stats(buddy_of(self), &stats);
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K}",                //
                         "capacity_bytes", stats.capacity_bytes,         //
                         "free_bytes", stats.free_bytes,                 //
                         "used_bytes", stats.used_bytes,                 //
                         "requested_bytes", stats.requested_bytes,       //
                         "num_blocks", stats.num_blocks,                 //
                         "largest_free_bytes", stats.largest_free_bytes, //
                         "high_water_bytes", stats.high_water_bytes);
}

static PyObject*
buddy_check_method(PyObject* self, PyObject* unused) {
    (void)unused;
    const char* broken = buddy_check(buddy_of(self));
    if (broken != NULL) {
        return PyErr_Format(PyExc_RuntimeError, "buddy invariant broken: %s", broken);
    }
    Py_RETURN_NONE;
}

static PyMethodDef buddy_methods[] = {
    {"alloc", buddy_alloc_method, METH_O,
     "alloc(nbytes): reserve bytes and return a handle; MemoryError when nothing fits."},
    {"free", buddy_free_method, METH_O,
     "free(handle): give the bytes back; ValueError for a handle that is not live."},
    {"offset", buddy_offset_method, METH_O, "offset(handle): where its first byte is."},
    {"nbytes", buddy_nbytes_method, METH_O, "nbytes(handle): the bytes reserved for it."},
    {"stats", buddy_stats_method, METH_NOARGS, "stats(): a snapshot of the counters."},
    {"check", buddy_check_method, METH_NOARGS,
     "check(): walk every invariant; RuntimeError names the one that is broken."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot buddy_slots[] = {
    {Py_tp_doc, "Buddy(capacity_bytes, min_block_bytes): allocates offsets, touches no memory."},
    {Py_tp_new, buddy_new},
    {Py_tp_dealloc, buddy_dealloc},
    {Py_tp_methods, buddy_methods},
    {0, NULL},
};

PyType_Spec buddy_spec = {
    .name = "mempool._native.Buddy",
    .basicsize = sizeof(buddy_object_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = buddy_slots,
};
