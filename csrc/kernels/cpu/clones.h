// Compiles a loop several times, once per generation of x86 processors; the loader picks one.
//
// Without this a portable build may use 16-byte registers only, where casts of half types are
// three to ten times slower than memory. ThreadSanitizer cannot have them: the loader picks before
// it has begun.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define ZEROCORE_CPU_CLONES \
  __attribute__((target_clones("arch=x86-64-v3", "arch=x86-64-v4", "default")))
#else
#define ZEROCORE_CPU_CLONES
#endif
