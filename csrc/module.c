#include "binding.h"

static int
add_type(PyObject* module, PyTypeObject** type, PyType_Spec* spec) {
    *type = (PyTypeObject*)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type == NULL ? -1 : PyModule_AddType(module, *type);
}

static int
module_exec(PyObject* module) {
    module_state_t* state = PyModule_GetState(module);
    if (add_type(module, &state->buddy_type, &buddy_spec) < 0 ||
        add_type(module, &state->arena_type, &arena_spec) < 0 ||
        add_type(module, &state->mover_type, &mover_spec) < 0 ||
        add_type(module, &state->job_type, &job_spec) < 0) {
        return -1;
    }
    return 0;
}

static int
module_traverse(PyObject* module, visitproc visit, void* arg) {
    module_state_t* state = PyModule_GetState(module);
    Py_VISIT(state->buddy_type);
    Py_VISIT(state->arena_type);
    Py_VISIT(state->mover_type);
    Py_VISIT(state->job_type);
    return 0;
}

static int
module_clear(PyObject* module) {
    module_state_t* state = PyModule_GetState(module);
    Py_CLEAR(state->buddy_type);
    Py_CLEAR(state->arena_type);
    Py_CLEAR(state->mover_type);
    Py_CLEAR(state->job_type);
    return 0;
}

static void
module_free(void* module) {
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mempool._native",
    .m_doc = "Buddy allocator, shared host arena, and a thread that moves bytes.",
    .m_size = sizeof(module_state_t),
    .m_methods = memory_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void);

PyMODINIT_FUNC
PyInit__native(void) {
    return PyModuleDef_Init(&module_def);
}
