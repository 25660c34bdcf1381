/* Optional steps that make host memory faster for devices. None is fatal: each says in words how it
 * went. CUDA is looked up in what the process has loaded already; nothing is linked or loaded. */
#ifndef P2P_PIN_H
#define P2P_PIN_H

#include <stddef.h>

enum { PIN_REPORT_BYTES = 128 };

/* Undoes a cuda registration; NULL when there is none. */
typedef int (*pin_unregister_t)(void* address);

void pin_huge_pages(void* address, size_t nbytes, char report[PIN_REPORT_BYTES]);
void pin_page_lock(void* address, size_t nbytes, char report[PIN_REPORT_BYTES]);
pin_unregister_t pin_cuda_register(void* address, size_t nbytes, char report[PIN_REPORT_BYTES]);

#endif
