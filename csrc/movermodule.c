#include "binding.h"

#include "mover.h"

typedef struct {
    PyObject_HEAD mover_t* mover;
} mover_object_t;

static const double DEALLOC_CLOSE_SECONDS = 2.0;
static const Py_ssize_t MAX_SLICE_BYTES = (Py_ssize_t)1 << 30;

static mover_t*
mover_of(PyObject* self) {
    return ((mover_object_t*)self)->mover;
}

static bool
raise_status(mover_status_t status, uint64_t channel, uint64_t seq) {
    switch (status) {
    case MOVER_OK:
        return true;
    case MOVER_ERRNO:
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    case MOVER_CLOSED:
        PyErr_SetString(PyExc_ValueError, "the mover is closed");
        return false;
    case MOVER_UNKNOWN_CHANNEL:
        PyErr_Format(PyExc_ValueError, "channel %llu is not attached", (unsigned long long)channel);
        return false;
    case MOVER_DUPLICATE:
        break;
    }
    PyErr_Format(PyExc_ValueError, "channel %llu or seq %llu on it exists already",
                 (unsigned long long)channel, (unsigned long long)seq);
    return false;
}

/* ---- life ---- */

static PyObject*
mover_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"slice_bytes", NULL};
    Py_ssize_t slice_bytes = 1 << 20;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$n:Mover", keywords, &slice_bytes)) {
        return NULL;
    }
    if (slice_bytes <= 0 || slice_bytes > MAX_SLICE_BYTES) {
        return PyErr_Format(PyExc_ValueError, "slice_bytes must be in [1, %zd], got %zd",
                            MAX_SLICE_BYTES, slice_bytes);
    }
    mover_object_t* self = (mover_object_t*)object_new(type);
    if (self == NULL) {
        return NULL;
    }
    self->mover = mover_create((size_t)slice_bytes);
    if (self->mover == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject*)self;
}

static bool
close_without_gil(mover_t* mover, double timeout) {
    bool is_closed = false;
    Py_BEGIN_ALLOW_THREADS is_closed = mover_close(mover, timeout);
    Py_END_ALLOW_THREADS return is_closed;
}

/* A thread that does not end goes on using the mover: leaking it is the lesser evil. */
static void
mover_dealloc(PyObject* self) {
    mover_t* mover = mover_of(self);
    if (mover != NULL && close_without_gil(mover, DEALLOC_CLOSE_SECONDS)) {
        for (job_t *next, *job = mover_drain(mover); job != NULL; job = next) {
            next = job->next_ended;
            Py_DECREF(job_unwrap_ended(job));
        }
        mover_release(mover);
    }
    object_free(self);
}

static PyObject*
mover_close_method(PyObject* self, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"timeout", NULL};
    double timeout = 2.0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|d:close", keywords, &timeout)) {
        return NULL;
    }
    return PyBool_FromLong(close_without_gil(mover_of(self), timeout));
}

/* ---- jobs ---- */

/* Creates, wraps and submits. The mover's reference to the wrapper comes back with mover_drain. */
static PyObject*
submit(PyObject* self, job_t* job, PyObject* tag, PyObject* keep) {
    if (job == NULL) {
        return PyErr_NoMemory();
    }
    PyObject* wrapper = job_wrap(state_of(self), job, tag, keep);
    if (wrapper == NULL) {
        return NULL;
    }
    Py_INCREF(wrapper);
    if (!raise_status(mover_submit(mover_of(self), job), job->channel, job->seq)) {
        Py_DECREF(wrapper);
        Py_DECREF(wrapper);
        return NULL;
    }
    return wrapper;
}

static PyObject*
mover_copy_method(PyObject* self, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"sources", "destinations", "lengths", "word_address", "word_value",
                               "lane",    "checked",      "tag",     "keep",         NULL};
    PyObject* sources = NULL;
    PyObject* destinations = NULL;
    PyObject* lengths = NULL;
    uint64_t word_address = 0;
    uint64_t word_value = 0;
    uint64_t lane = 0;
    int checked = 0;
    PyObject* tag = Py_None;
    PyObject* keep = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$O&O&O&pOO:copy", keywords, &sources,
                                     &destinations, &lengths, convert_u64, &word_address,
                                     convert_u64, &word_value, convert_u64, &lane, &checked, &tag,
                                     &keep)) {
        return NULL;
    }
    uint64_t* word = word_address != 0 ? word_at(word_address) : NULL;
    regions_t regions;
    if ((word_address != 0 && word == NULL) ||
        !parse_regions(sources, destinations, lengths, &regions)) {
        return NULL;
    }
    job_t* job = job_create(JOB_COPY, &regions, 0, 0);
    if (job != NULL) {
        job->word = word;
        job->word_value = word_value;
        job->lane = lane;
        job->is_checked = checked != 0;
    }
    return submit(self, job, tag, keep);
}

static PyObject*
mover_check_method(PyObject* self, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"sources", "lengths", "lane", "tag", "keep", NULL};
    PyObject* sources = NULL;
    PyObject* lengths = NULL;
    uint64_t lane = 0;
    PyObject* tag = Py_None;
    PyObject* keep = Py_None;
    regions_t regions;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O&OO:check", keywords, &sources, &lengths,
                                     convert_u64, &lane, &tag, &keep) ||
        !parse_regions(sources, NULL, lengths, &regions)) {
        return NULL;
    }
    job_t* job = job_create(JOB_CHECK, &regions, 0, 0);
    if (job != NULL) {
        job->lane = lane;
        job->is_checked = true;
    }
    return submit(self, job, tag, keep);
}

static PyObject*
submit_stream(PyObject* self, job_kind_t kind, PyObject* args, PyObject* kwargs) {
    static char* send_keywords[] = {"channel", "seq", "sources", "lengths",
                                    "checked", "tag", "keep",    NULL};
    static char* expect_keywords[] = {"channel", "seq", "destinations", "lengths",
                                      "checked", "tag", "keep",         NULL};
    PyObject* addresses = NULL;
    PyObject* lengths = NULL;
    uint64_t channel = 0;
    uint64_t seq = 0;
    int checked = 0;
    PyObject* tag = Py_None;
    PyObject* keep = Py_None;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, kind == JOB_SEND ? "O&O&OO|$pOO:send" : "O&O&OO|$pOO:expect",
            kind == JOB_SEND ? send_keywords : expect_keywords, convert_u64, &channel, convert_u64,
            &seq, &addresses, &lengths, &checked, &tag, &keep)) {
        return NULL;
    }
    regions_t regions;
    bool is_parsed = kind == JOB_SEND ? parse_regions(addresses, NULL, lengths, &regions)
                                      : parse_regions(NULL, addresses, lengths, &regions);
    if (!is_parsed) {
        return NULL;
    }
    job_t* job = job_create(kind, &regions, channel, seq);
    if (job != NULL) {
        job->is_checked = checked != 0;
    }
    return submit(self, job, tag, keep);
}

static PyObject*
mover_send_method(PyObject* self, PyObject* args, PyObject* kwargs) {
    return submit_stream(self, JOB_SEND, args, kwargs);
}

static PyObject*
mover_expect_method(PyObject* self, PyObject* args, PyObject* kwargs) {
    return submit_stream(self, JOB_EXPECT, args, kwargs);
}

static PyObject*
mover_drain_method(PyObject* self, PyObject* unused) {
    (void)unused;
    PyObject* ended = PyList_New(0);
    if (ended == NULL) {
        return NULL;
    }
    for (job_t *next, *job = mover_drain(mover_of(self)); job != NULL; job = next) {
        next = job->next_ended;
        PyObject* wrapper = job_unwrap_ended(job);
        bool is_listed = PyList_Append(ended, wrapper) == 0;
        Py_DECREF(wrapper);
        if (!is_listed) {
            Py_CLEAR(ended);
        }
    }
    return ended;
}

/* ---- channels ---- */

static PyObject*
mover_attach_method(PyObject* self, PyObject* args, PyObject* kwargs) {
    static char* keywords[] = {"fd", "channel", NULL};
    int fd = -1;
    uint64_t channel = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO&:attach", keywords, &fd, convert_u64,
                                     &channel) ||
        !raise_status(mover_attach(mover_of(self), fd, channel), channel, 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject*
mover_detach_method(PyObject* self, PyObject* object) {
    uint64_t channel = 0;
    if (!convert_u64(object, &channel)) {
        return NULL;
    }
    mover_detach(mover_of(self), channel);
    Py_RETURN_NONE;
}

/* ---- the rest ---- */

static PyObject*
mover_fileno_method(PyObject* self, PyObject* unused) {
    (void)unused;
    int fd = mover_fileno(mover_of(self));
    if (fd < 0) {
        raise_status(MOVER_CLOSED, 0, 0);
        return NULL;
    }
    return PyLong_FromLong(fd);
}

static PyObject*
mover_stats_method(PyObject* self, PyObject* unused) {
    (void)unused;
    mover_stats_t stats;
    mover_stats(mover_of(self), &stats);
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:i}",      //
                         "jobs_ended", stats.jobs_ended,           //
                         "bytes_copied", stats.bytes_copied,       //
                         "bytes_sent", stats.bytes_sent,           //
                         "bytes_received", stats.bytes_received,   //
                         "bytes_dropped", stats.bytes_dropped,     //
                         "channels", stats.num_channels,           //
                         "protocol_errors", stats.protocol_errors, //
                         "alive", (int)stats.is_alive);
}

#define WITH_KEYWORDS(function)                                                                    \
    (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef mover_methods[] = {
    {"fileno", mover_fileno_method, METH_NOARGS, "fileno(): readable while jobs can be drained."},
    {"drain", mover_drain_method, METH_NOARGS,
     "drain(): the jobs that ended since the last call, each exactly once."},
    {"copy", WITH_KEYWORDS(mover_copy_method),
     "copy(sources, destinations, lengths, *, word_address=0, word_value=0, lane=0, checked=False, "
     "tag=None, keep=None): jobs of one lane are done in order, lanes take turns."},
    {"check", WITH_KEYWORDS(mover_check_method),
     "check(sources, lengths, *, lane=0, tag=None, keep=None): only the checksum."},
    {"attach", WITH_KEYWORDS(mover_attach_method),
     "attach(fd, channel): serve a connected stream socket; the descriptor is dup'ed."},
    {"detach", mover_detach_method, METH_O,
     "detach(channel): end its jobs as failed and close it; idempotent."},
    {"send", WITH_KEYWORDS(mover_send_method),
     "send(channel, seq, sources, lengths, *, checked=False, tag=None, keep=None)"},
    {"expect", WITH_KEYWORDS(mover_expect_method),
     "expect(channel, seq, destinations, lengths, *, checked=False, tag=None, keep=None)"},
    {"stats", mover_stats_method, METH_NOARGS, "stats(): a snapshot of the counters."},
    {"close", WITH_KEYWORDS(mover_close_method),
     "close(timeout=2.0): stop and join the thread, cancel what is open; False if it did not end."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mover_slots[] = {
    {Py_tp_doc, "Mover(*, slice_bytes=1048576): one native thread that copies and streams."},
    {Py_tp_new, mover_new},
    {Py_tp_dealloc, mover_dealloc},
    {Py_tp_methods, mover_methods},
    {0, NULL},
};

PyType_Spec mover_spec = {
    .name = "mempool._native.Mover",
    .basicsize = sizeof(mover_object_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mover_slots,
};
