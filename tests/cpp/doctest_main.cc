// The main() that all C++ tests share: compiling it costs more than most of the tests do.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
