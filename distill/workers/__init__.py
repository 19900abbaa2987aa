"""Worker processes as a context manager. Knows nothing of what the workers do.

    with WorkerPool(factory, init_args) as pool:
        for task_id, result in pool.run(tasks, on_progress=show): ...

Every worker is a spawned process with a pipe of its own, so that a dying worker can't corrupt what others say.
``child`` is what runs inside it, ``pool`` the parent's side.
"""

from distill.workers.child import Channel, Died, Done, Event, Free, Later, Progress, Ready, Request, Worker, WorkerError
from distill.workers.pool import Task, WorkerPool

__all__ = [
    "Channel",
    "Died",
    "Done",
    "Event",
    "Free",
    "Later",
    "Progress",
    "Ready",
    "Request",
    "Task",
    "Worker",
    "WorkerError",
    "WorkerPool",
]
