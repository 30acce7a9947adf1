"""What `verify` finds: one record a fault, collected and never raised, so that none hides another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.errors import EaglehsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    file: str
    """Path within the run or dataset."""

    message: str
    key: str = ""
    """The sample, where it is one sample's."""

    array: str = ""
    """The array, where it is one array's."""

    row: int | None = None
    """The first row that shows it."""

    def __str__(self) -> str:
        """Return `file: key array row 3: message`, leaving out what is not known."""
        parts = [self.key, self.array, "" if self.row is None else f"row {self.row}"]
        place = " ".join(part for part in parts if part)
        return f"{self.file}: {place}: {self.message}" if place else f"{self.file}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All that a verification has found."""

    path: str
    kind: str
    """`run` or `dataset`."""

    num_samples: int
    num_tokens: int
    num_files: int
    """Dumps or shards that were read."""

    size_bytes: int
    faults: tuple[Fault, ...]
    only_remote: tuple[str, ...] = ()
    """Shards that are on the Hub and not here, as `hf://datasets/org/name@revision: data/train-00000.tar`; without
    `hf://datasets/` and revision where their push has not ended. Nothing of them was read."""

    @property
    def is_good(self) -> bool:
        """Whether nothing was found."""
        return not self.faults


@dataclass(slots=True)
class Findings:
    """Faults and counts of one part of the work, by one thread."""

    root: Path
    faults: list[Fault] = field(default_factory=list)
    num_samples: int = 0
    num_tokens: int = 0
    num_files: int = 0
    size_bytes: int = 0
    only_remote: list[str] = field(default_factory=list)

    def add(self, file: str, message: str, *, key: str = "", array: str = "", row: int | None = None) -> None:
        """Note a fault."""
        self.faults.append(Fault(file=file, message=message, key=key, array=array, row=row))

    def merge(self, other: Findings) -> None:
        """Take over what another part found."""
        self.faults += other.faults
        self.num_samples += other.num_samples
        self.num_tokens += other.num_tokens
        self.num_files += other.num_files
        self.size_bytes += other.size_bytes
        self.only_remote += other.only_remote

    @contextmanager
    def noting(self, file: str, *, key: str = "") -> Iterator[None]:
        """Note an error of the block as a fault and go on after it: the border of one damaged file."""
        try:
            yield
        except EaglehsError as fault:
            self.add(file, self._shortened(str(fault), file), key=key)
        except OSError as fault:
            self.add(file, f"can't be read: {fault.strerror or fault}", key=key)

    def report(self, kind: str) -> VerifyReport:
        """Return all as a report."""
        return VerifyReport(
            path=str(self.root),
            kind=kind,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            num_files=self.num_files,
            size_bytes=self.size_bytes,
            faults=tuple(self.faults),
            only_remote=tuple(self.only_remote),
        )

    def _shortened(self, text: str, file: str) -> str:
        """Leave out the folder, and a file's name that the fault bears anyhow."""
        return text.replace(f"{self.root}/", "").removeprefix(file).removeprefix(":").lstrip()
