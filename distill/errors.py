"""The errors a user sees: one line each, with the exit code that belongs to it.

Everything that isn't one of these, or ``machine_failed``, is a fault of ours and ends with exit code 1.
"""

import errno

MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
"""What the operating system says when the machine, not the user's input, is at fault."""

# Words of torch's errors for the same. Its class for a full GPU is known by name, so that nothing is imported.
_MACHINE_WORDS = ("DefaultCPUAllocator", "CUDA error")


class DistillError(Exception):
    """Base of all expected failures. The message is one line: what is wrong, where, what to do."""

    exit_code = 1


class InputError(DistillError, ValueError):
    """The user's input (configuration, dataset, model folder, cache) has to be mended."""

    exit_code = 2


class MachineError(DistillError, RuntimeError):
    """The machine failed: disk, memory, a lost device, a worker killed from outside."""

    exit_code = 3


def machine_failed(error: BaseException) -> bool:
    """Whether an unexpected exception is the machine's: memory, disk, a lost device."""
    match error:
        case OSError():
            return error.errno in MACHINE_ERRNOS
        case MemoryError():
            return True
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MACHINE_WORDS)
