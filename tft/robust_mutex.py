"""
A robust mutex in shared memory, by which one process learns at once that a thread of another
process has ended.

The kernel reports the end of a process through its pidfd only when it has freed the memory of the
process, which takes tens of milliseconds. A robust mutex is faster: as soon as the thread that
holds the mutex has ended, the kernel wakes a thread that waits for the mutex (error EOWNERDEAD).

The mutex is a `pthread_mutex_t` of the C library. If the C library has no robust mutexes, the
method `create` raises `OSError`.
"""

import ctypes
import errno
import mmap
import os
import threading

SIZE = 64
"""The number of bytes that are reserved for a mutex. glibc needs 40 bytes on x86-64 and 48 on
arm64."""
_PROCESS_SHARED, _ROBUST = 1, 1
_ATTRIBUTES = 64


class RobustMutex:
    """
    The mutex at `offset` in the shared memory `memory`. Each process that uses the mutex creates
    its own object of this class for it.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._library = ctypes.CDLL(None)
        # this object keeps the memory mapped until `close`
        self._bytes: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * SIZE).from_buffer(
            memory, offset
        )
        self._holder: int | None = None
        """The identifier of the thread of this process that holds the mutex. None: no thread of
        this process holds it."""
        self._address = ctypes.c_void_p(ctypes.addressof(self._bytes))

    def create(self) -> None:
        """
        Initialise the mutex in the memory, so that no thread holds it. Raises `OSError` if the C
        library has no robust mutexes.
        """
        attributes = (ctypes.c_char * _ATTRIBUTES)()
        library = self._library
        try:
            self._check(library.pthread_mutexattr_init(attributes))
            self._check(library.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
            self._check(library.pthread_mutexattr_setrobust(attributes, _ROBUST))
            self._check(library.pthread_mutex_init(self._address, attributes))
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"the C library has no robust mutexes: {error}") from None

    def hold(self) -> bool:
        """
        Take the mutex, and hold it until this thread ends or calls `close`. Return False if another
        thread holds the mutex.
        """
        taken = self._taken(self._library.pthread_mutex_trylock(self._address))
        if taken:
            self._holder = threading.get_ident()
        return taken

    def is_held(self) -> bool:
        """
        Return whether a living thread holds the mutex.
        """
        if not self._taken(self._library.pthread_mutex_trylock(self._address)):
            return True
        self._library.pthread_mutex_unlock(self._address)
        return False

    def wait(self) -> bool:
        """
        Wait until the thread that holds the mutex has ended (return True) or has released the mutex
        (return False). If no thread holds the mutex, return at once.
        """
        code = self._library.pthread_mutex_lock(self._address)
        if self._taken(code):
            self._library.pthread_mutex_unlock(self._address)
        return bool(code == errno.EOWNERDEAD)

    def close(self) -> None:
        """
        Unmap the memory. If this thread holds the mutex, release it first: the C library keeps a
        list of the mutexes that a thread holds, and would otherwise read the unmapped memory.
        """
        if self._holder == threading.get_ident():
            self._library.pthread_mutex_unlock(self._address)
            self._holder = None
        self._bytes = None

    def _taken(self, code: int) -> bool:
        """
        Return whether a call of the C library that has returned `code` has taken the mutex. If the
        code says that the earlier holder has ended, make the mutex usable again.
        """
        if code == errno.EOWNERDEAD:
            self._library.pthread_mutex_consistent(self._address)
        return code in (0, errno.EOWNERDEAD)

    def _check(self, code: int) -> None:
        if code:
            raise OSError(code, os.strerror(code))
