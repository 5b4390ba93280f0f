"""Rows of the tables on the worker itself: what a step finds there crosses no network.

``settings.py`` is what an author gives. On the CPU the native session does the work (``cpp_ext/session/row_cache.h``
and ``session_cache.h``). Nothing is imported here, so that ``device_rows.py`` and ``kernels.py``, which need torch and
triton alone, can be loaded without the rest.
"""
