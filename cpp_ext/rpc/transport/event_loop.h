// The one way to include asio. Its allocation functions depend on what the C++ library has announced by
// then: with a standard header first, every translation unit sees the same ones. (Two that differ made one
// free with operator delete what the other had from aligned_alloc.)
#pragma once

#include <cstddef>
#include <cstdlib>

// The thread sanitizer knows no fences, and GCC refuses them under it; asio's queues are locked besides.
#if defined(__SANITIZE_THREAD__)
#define ASIO_DISABLE_FENCED_BLOCK
#endif

#include <asio.hpp>
