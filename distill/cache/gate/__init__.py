"""The gate: no file of a stranger is opened here before a child process with limits has checked all of it.

``Admissions`` keeps the verdicts, ``Gate`` runs the child, ``structure`` and ``meaning`` are what it checks.
"""

from distill.cache.gate.admissions import Admissions
from distill.cache.gate.gate import Finding, Gate, RefusedShardError

__all__ = ["Admissions", "Finding", "Gate", "RefusedShardError"]
