"""
Python that a test runs before a script (the `patch` of conftest.Forked): the script then has a file system without
fsync of folders, without locks and without mmap, as some network mounts are, and may open few files at a time.
"""

import errno
import fcntl
import mmap
import os
import resource
import stat


def fail(number):
    raise OSError(number, os.strerror(number))


fsync = os.fsync
os.fsync = lambda fd: fail(errno.EINVAL) if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync(fd)
fcntl.flock = lambda fd, operation: fail(errno.ENOLCK)
mmap.mmap = lambda *args, **options: fail(errno.ENODEV)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
