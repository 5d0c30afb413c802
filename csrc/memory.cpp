#include "memory.h"

#include <new>

#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace outpace {

#ifdef _WIN32
uint8_t* map_memory(size_t bytes) {
    void* at = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!at) throw std::bad_alloc();
    return static_cast<uint8_t*>(at);
}

void unmap_memory(uint8_t* at, size_t) { VirtualFree(at, 0, MEM_RELEASE); }
#else
uint8_t* map_memory(size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(at, bytes, MADV_HUGEPAGE);
#endif
    return static_cast<uint8_t*>(at);
}

void unmap_memory(uint8_t* at, size_t bytes) { munmap(at, bytes); }
#endif

}  // namespace outpace
