/* Shared by the binding's files. Only they include Python; each parses, calls, and raises. */
#ifndef P2P_BINDING_H
#define P2P_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "job.h"
#include "regions.h"

typedef struct {
    PyTypeObject* buddy_type;
    PyTypeObject* arena_type;
    PyTypeObject* mover_type;
    PyTypeObject* job_type;
    uint32_t num_buddies; /* ever made: salts their handles */
} module_state_t;

extern PyType_Spec buddy_spec;
extern PyType_Spec arena_spec;
extern PyType_Spec mover_spec;
extern PyType_Spec job_spec;
extern PyMethodDef memory_methods[];

/* The types are final, so an object's type is the one that the module made. */
static inline module_state_t*
state_of(PyObject* self) {
    return PyType_GetModuleState(Py_TYPE(self));
}

/* The limited API shows a type's functions only by their slots. */
static inline PyObject*
object_new(PyTypeObject* type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* Ends a deallocation: an object holds a reference to its type. */
static inline void
object_free(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* "O&" converter: an int in [0, 2^64), ValueError for any other int. */
int convert_u64(PyObject* object, void* result);

/* Copies int64 buffers into a list of regions; `sources` or `destinations` may be NULL. Raises and
 * returns false on failure. */
bool parse_regions(PyObject* sources, PyObject* destinations, PyObject* lengths,
                   regions_t* regions);

/* Turns a uint64 address of an aligned word into a pointer. Raises and returns NULL on failure. */
uint64_t* word_at(uint64_t address);

/* Wraps the job and takes its reference over, also on failure. */
PyObject* job_wrap(module_state_t* state, job_t* job, PyObject* tag, PyObject* keep);

/* Takes the mover's references to an ended job back; returns the wrapper, a new reference. */
PyObject* job_unwrap_ended(job_t* job);

#endif
