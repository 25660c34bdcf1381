#include "binding.h"

#include "mover.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD job_t* job;
    PyObject* tag;
    PyObject* keep; /* alive until the job has ended and was drained */
} job_object_t;

static job_object_t*
object_of(PyObject* self) {
    return (job_object_t*)self;
}

PyObject*
job_wrap(module_state_t* state, job_t* job, PyObject* tag, PyObject* keep) {
    job_object_t* self = PyObject_GC_New(job_object_t, state->job_type);
    if (self == NULL) {
        job_release(job);
        return NULL;
    }
    self->job = job;
    self->tag = Py_NewRef(tag);
    self->keep = Py_NewRef(keep);
    job->owner = self;
    PyObject_GC_Track(self);
    return (PyObject*)self;
}

PyObject*
job_unwrap_ended(job_t* job) {
    PyObject* self = job->owner;
    Py_CLEAR(object_of(self)->keep);
    job_release(job);
    return self;
}

static int
job_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(object_of(self)->tag);
    Py_VISIT(object_of(self)->keep);
    return 0;
}

static int
job_clear(PyObject* self) {
    Py_CLEAR(object_of(self)->tag);
    Py_CLEAR(object_of(self)->keep);
    return 0;
}

static void
job_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    job_clear(self);
    job_release(object_of(self)->job);
    object_free(self);
}

static PyObject*
job_cancel_method(PyObject* self, PyObject* unused) {
    (void)unused;
    mover_cancel(object_of(self)->job);
    Py_RETURN_NONE;
}

static PyObject*
job_wait_method(PyObject* self, PyObject* object) {
    double timeout = PyFloat_AsDouble(object);
    if (timeout == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    bool has_ended = false;
    Py_BEGIN_ALLOW_THREADS has_ended = mover_wait(object_of(self)->job, timeout);
    Py_END_ALLOW_THREADS return PyBool_FromLong(has_ended);
}

static PyObject*
job_get_state(PyObject* self, void* unused) {
    (void)unused;
    static const char* const names[] = {
        [JOB_QUEUED] = "queued", [JOB_RUNNING] = "running",     [JOB_DONE] = "done",
        [JOB_FAILED] = "failed", [JOB_CANCELLED] = "cancelled",
    };
    return PyUnicode_FromString(names[job_state(object_of(self)->job)]);
}

static PyObject*
job_get_done(PyObject* self, void* unused) {
    (void)unused;
    return PyBool_FromLong(job_has_ended(object_of(self)->job));
}

static PyObject*
job_get_error(PyObject* self, void* unused) {
    (void)unused;
    const job_t* job = object_of(self)->job;
    if (!job_has_ended(job) || job->error[0] == '\0') {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeUTF8(job->error, (Py_ssize_t)strlen(job->error), "replace");
}

static PyObject*
job_get_nbytes(PyObject* self, void* unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(object_of(self)->job->regions.nbytes);
}

static PyObject*
job_get_checksum(PyObject* self, void* unused) {
    (void)unused;
    const job_t* job = object_of(self)->job;
    if (job_state(job) != JOB_DONE || !job->is_checked) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLong(job->checksum);
}

static PyMethodDef job_methods[] = {
    {"cancel", job_cancel_method, METH_NOARGS, "cancel(): asynchronous; a no-op once it ended."},
    {"wait", job_wait_method, METH_O, "wait(timeout): True if it ended within the seconds."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef job_members[] = {
    {"tag", T_OBJECT, offsetof(job_object_t, tag), READONLY, "The caller's."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef job_getset[] = {
    {"state", job_get_state, NULL, "queued, running, done, failed or cancelled.", NULL},
    {"done", job_get_done, NULL, "It ended in any way: its memory is not touched any more.", NULL},
    {"error", job_get_error, NULL, "Why it failed or was cancelled, else None.", NULL},
    {"nbytes", job_get_nbytes, NULL, "Total of its regions.", NULL},
    {"checksum", job_get_checksum, NULL, "CRC-32C, if it was asked for and the job is done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot job_slots[] = {
    {Py_tp_doc, "One copy, send or expected receive of a Mover."},
    {Py_tp_dealloc, job_dealloc},
    {Py_tp_traverse, job_traverse},
    {Py_tp_clear, job_clear},
    {Py_tp_methods, job_methods},
    {Py_tp_members, job_members},
    {Py_tp_getset, job_getset},
    {0, NULL},
};

PyType_Spec job_spec = {
    .name = "mempool._native.Job",
    .basicsize = sizeof(job_object_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = job_slots,
};
