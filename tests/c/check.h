/* The whole test framework: a failed check says where and ends the program. */
#ifndef P2P_TESTS_CHECK_H
#define P2P_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: in %s: %s\n", __FILE__, __LINE__, __func__, #condition);       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define RUN(test)                                                                                  \
    do {                                                                                           \
        test();                                                                                    \
        printf("ok %s\n", #test);                                                                  \
        fflush(stdout);                                                                            \
    } while (0)

#endif
