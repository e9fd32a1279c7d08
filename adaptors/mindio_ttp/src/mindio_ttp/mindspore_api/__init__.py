"""
An empty package with the name of the package in which MindIO has the C library `libttp_c_api.so`.
MindSpore's runtime loads that library.

tft has no such C library. See `docs/reference/mindio_differences.md`, "What is not there".
"""
