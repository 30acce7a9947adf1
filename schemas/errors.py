"""Every error that a user may meet: one base, one family per exit code.

Only `EaglehsError` is printed without a traceback (eaglehs/main.py); anything else is a bug. A message says what,
why and how to mend, with the values. Families are here; a class that a caller may want to catch on its own lives
beside the code that raises it and derives from its family.
"""

from __future__ import annotations

from typing import ClassVar


class EaglehsError(Exception):
    """Base of all errors that are the user's to mend; `exit_code` is the command's."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str = "", mend: str = "") -> None:
        """Keep the three parts; the message is those that are given, as sentences."""
        self.what = what
        self.why = why
        self.mend = mend
        super().__init__(" ".join(_sentence(part) for part in (what, why, mend) if part))


class DataError(EaglehsError):
    """A fault in the data: a dump, sample, shard, record or prompt that is not what it says (exit 1)."""

    exit_code: ClassVar[int] = 1


class UsageError(EaglehsError):
    """The command was asked for something that can't be done as asked (exit 2)."""

    exit_code: ClassVar[int] = 2


class EngineError(EaglehsError):
    """The server or engine failed, or can't capture right (exit 3)."""

    exit_code: ClassVar[int] = 3


class StorageError(EaglehsError):
    """A disk, object store or the Hub failed: full, read-only, refused (exit 4)."""

    exit_code: ClassVar[int] = 4


class InterruptedRunError(EaglehsError):
    """The user stopped the command; all finished work is kept (exit 130)."""

    exit_code: ClassVar[int] = 130


class RecordError(DataError):
    """A stored record (run.json, a ledger line, a manifest ...) can't be read as what it should be."""

    def __init__(self, what: str, *, where: str, why: str = "", mend: str = "") -> None:
        """`where` names the file, and the line or field if there is one."""
        self.where = where
        super().__init__(f"{where}: {what}", why=why, mend=mend)


class MissingPackageError(UsageError):
    """A command needs a package of an extra that is not installed."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        """Name the package, the extra that brings it and what it is needed for."""
        self.package = package
        self.extra = extra
        super().__init__(
            f"{needed_for} needs the package {package}, which is not installed",
            mend=f"Install it with: pip install 'eaglehs[{extra}]'",
        )


def first_line(fault: BaseException) -> str:
    """Return the first line of what another library says, or its error's name where it says nothing."""
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:300]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."
