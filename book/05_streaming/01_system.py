# %% [markdown]
# # 5.1 What depends on the operating system
#
# [4.2 Latent experts: sixteen in half the width, two that always speak](../04_moe_router/02_moe.ipynb) · [contents](../README.md) · [5.2 Files read whole or refused, written whole or not at all](02_fileio.ipynb)

# %% tags=["export"]
import ctypes
import errno
import os
import threading

# %% tags=["export"]
_POSITION = threading.Lock()


def _preadv(file, view, offset):
    return os.preadv(file.fileno(), [view], offset)


def _seek_read(file, view, offset):
    "The same where the system has no preadv: a file's position is shared, so one at a time."
    with _POSITION:
        file.seek(offset)
        return file.readinto(view)


pread_into = _preadv if hasattr(os, "preadv") else _seek_read


# %% tags=["export"]
def sync_folder(folder):
    "A new name in a folder is on the disk when the folder is."
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# %% tags=["export"]
def data_runs(fd, begin, end):
    "(begin, end) of the parts of a file's bytes begin..end that are not holes; all of it where the system cannot tell."
    while begin < end:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
            stop = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENXIO:  # nothing but a hole up to the end
                return
            stop = end
        if begin < end:
            yield begin, stop
        begin = stop


# %% tags=["export"]
def return_freed_memory():
    """Have freed arrays of a megabyte and more go back to the system at once, where the C library is glibc.

    Left alone, it learns from the first large array it frees to keep such pieces, of up to 32 MB, and they would count as ours.
    """
    try:
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        pass
