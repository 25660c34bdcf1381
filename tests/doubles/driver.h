/* What the parts of the double of the driver share. */
#ifndef DRIVER_H
#define DRIVER_H

#include "double.h"

/* Results of the driver's. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900,
};

/* What keeps a thread from a call of the driver's, 0: nothing. */
int enter(void);

/* Begins a call of the driver's that needs a context. */
#define ENTER()                                                                                    \
    do {                                                                                           \
        int problem = enter();                                                                     \
        if (problem != 0) {                                                                        \
            return problem;                                                                        \
        }                                                                                          \
    } while (0)

#endif
