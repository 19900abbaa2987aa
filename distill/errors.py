"""The errors a user sees: one line each, with the exit code that belongs to it.

Everything that isn't one of these is a fault of ours and ends with exit code 1.
"""


class DistillError(Exception):
    """Base of all expected failures. The message is one line: what is wrong, where, what to do."""

    exit_code = 1


class InputError(DistillError, ValueError):
    """The user's input (configuration, dataset, model folder, cache) has to be mended."""

    exit_code = 2


class MachineError(DistillError, RuntimeError):
    """The machine failed: disk, memory, a lost device, a worker killed from outside."""

    exit_code = 3
