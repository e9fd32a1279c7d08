"""
The directory in which MindIO keeps the C library for MindSpore's runtime, `libttp_c_api.so`.

tft has no such library, so this package is empty. See `docs/reference/mindio_differences.md`, "What
is not there".
"""
