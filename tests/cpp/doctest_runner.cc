// doctest's own part of all C++ tests: compiling it costs more than most of the tests do.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
