"""A row cache in the worker: rows that a step finds in it are not read over the network.

``settings.py`` has the options that a user gives. On the CPU the native session holds the rows
(``cpp_ext/session/row_cache.h`` and ``session_cache.h``). This module imports nothing, so that ``device_rows.py`` and
``kernels.py``, which need only torch and triton, can be loaded without the rest.
"""
