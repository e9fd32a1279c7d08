"""
A robust mutex in shared memory, by which one process learns at once that a thread of another
process has ended.

The kernel reports the end of a process through its pidfd only when it has freed the memory of the
process, which takes tens of milliseconds. A robust mutex is marked before that: when a thread ends
that holds it, the kernel wakes the next thread that waits for it (EOWNERDEAD).

The mutex is one of the C library, of at most `SIZE` bytes. Where the C library has none, `create`
raises `OSError`.
"""

import ctypes
import errno
import mmap
import os
import threading

SIZE = 64
"""The bytes that a mutex may take. glibc needs 40 on x86-64 and 48 on arm64."""
_PROCESS_SHARED, _ROBUST = 1, 1
_ATTRIBUTES = 64


class RobustMutex:
    """
    The mutex at an offset of some shared memory. Several processes have an object for one mutex.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._library = ctypes.CDLL(None)
        # this object keeps the memory mapped until `close`
        self._bytes: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * SIZE).from_buffer(
            memory, offset
        )
        self._holder: int | None = None
        """The thread of this process that holds the mutex. None: there is none."""
        self._address = ctypes.c_void_p(ctypes.addressof(self._bytes))

    def create(self) -> None:
        """
        Make the memory a mutex that nobody holds. Raises `OSError` if the C library cannot.
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
        Take the mutex, and keep it until this thread ends or calls `close`. Return False if another
        thread has it.
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
        Wait until the thread that holds the mutex has ended or has released it. Return True if it
        has ended. Without a holder, return at once.
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
        Return whether a call with this result has taken the mutex. If its holder has ended, make
        the mutex usable again.
        """
        if code == errno.EOWNERDEAD:
            self._library.pthread_mutex_consistent(self._address)
        return code in (0, errno.EOWNERDEAD)

    def _check(self, code: int) -> None:
        if code:
            raise OSError(code, os.strerror(code))
