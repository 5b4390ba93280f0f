# The toolchain of `make test-arm`: Debian's cross compiler, the libraries in SPARSEROW_SYSROOT, and qemu to run programs.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L ${SPARSEROW_SYSROOT})
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES SPARSEROW_SYSROOT)  # because this file is read anew for each check of the compiler
set(CMAKE_SYSROOT ${SPARSEROW_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
foreach(kind LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${kind} ONLY)
endforeach()
