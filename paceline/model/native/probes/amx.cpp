void probe(const void* from) { asm volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(from), "r"(64L)); }
#ifndef __AMX_INT8__
#error
#endif
