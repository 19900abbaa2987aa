"""How a check of the gate says no."""


class RefusedError(Exception):
    """The file is damaged or hostile; the message names the object in it and what is wrong."""


class OtherVersionError(Exception):
    """The file may be sound, but is of a version or kind that this program doesn't read."""


def require(holds: bool, what: str) -> None:
    """Raise RefusedError saying ``what`` unless it ``holds``."""
    if not holds:
        raise RefusedError(what)
