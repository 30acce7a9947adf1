"""Numbers that prove themselves: a few stored samples, computed again with the model itself.

open_stored -> choose_samples -> Reference.compute -> measure -> judge -> Verified
                              -> lm_head(final[-1]) == next_token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .schemas.codec import write_record
from .schemas.errors import UsageError
from .schemas.manifest import DatasetFolder
from .schemas.progress import Progress
from .schemas.published import published_model
from .schemas.run import ModelFacts
from .schemas.sample import NO_NEXT_TOKEN
from .schemas.states import FINAL
from .schemas.verified import Verified, manifest_sha256, verified_path

if TYPE_CHECKING:
    import torch

    from .builder.stored_samples import Listed, StoredSample
    from .extraction.compare import Measured
    from .extraction.lm_head import LmHead
    from .extraction.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """What to compare with, and how much."""

    model: str
    revision: str | None = None
    num_samples: int = 4
    seed: int = 0
    max_tokens: int = 512
    """Rows of each sample, from its first on: a causal model's first rows do not depend on later tokens."""

    trust_remote_code: bool = False


@dataclass(slots=True)
class _Found:
    """What the samples have shown so far."""

    measured: list[Measured] = field(default_factory=list)
    stored: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(key, state) -> the first rows that are stored."""

    wanted: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(key, state) -> the first rows that should be."""

    num_rows: int = 0
    num_next_tokens: int = 0
    num_next_agree: int = 0
    num_same: int = 0
    num_same_own: int | None = None
    faults: list[str] = field(default_factory=list)


def verify_model(path: Path, check: ModelCheck, progress: Progress) -> Verified:
    """Compute some samples of the run or dataset at `path` again, and tell how near the stored states are.

    Raises:
        UsageError: nothing to check is there, or the model has another shape than the states.
        DataError: the records or files of a sample are damaged: see `builder.verify`, which is to come first.
        EngineError: the model can't be loaded.
    """
    from .builder.stored_samples import choose_samples, open_stored
    from .extraction.model_facts import read_model_facts

    with open_stored(path) as stored:
        facts = read_model_facts(check.model, revision=check.revision)
        _check_shape(path, stored.model, facts)
        if facts.revision != stored.model.revision:
            progress.note(f"made with {stored.model.name} @ {stored.model.revision}, checked with {facts.revision}")
        chosen = choose_samples(stored.listed, check.num_samples, check.seed)
        progress.begin("load the model")
        reference = _load(check)
        rows = sum(min(sample.num_tokens, check.max_tokens) for sample in chosen)
        progress.begin("compute again", num_samples=len(chosen), num_tokens=rows)
        found = _Found()
        for listed in chosen:
            sample = stored.read(listed.key, check.max_tokens)
            _measure(found, sample, reference)
            _check_next_token(found, listed, sample, reference.lm_head)
            progress.advance(num_samples=1, num_tokens=len(sample.input_ids))
    return _verified(path, check, facts, reference.description, chosen, found)


def keep_verified(dataset: Path, record: Verified) -> Path | None:
    """Write the record beside the dataset's index and into its card; one with faults takes an older one away.

    Returns the file, or None where there are faults.
    """
    from .cards.write import write_card

    path = verified_path(dataset)
    if record.faults:
        path.unlink(missing_ok=True)
    else:
        write_record(path, record)
    if DatasetFolder(dataset).card.is_file():
        write_card(dataset)
    return None if record.faults else path


def _check_shape(path: Path, made: ModelFacts, given: ModelFacts) -> None:
    for what in ("num_layers", "hidden_size", "vocab_size"):
        old, new = getattr(made, what), getattr(given, what)
        if old != new:
            raise UsageError(
                f"{path} was made with {made.name}, whose {what} is {old}; that of {given.name} is {new}",
                mend=f"Give --model {made.name}",
            )


def _load(check: ModelCheck) -> Reference:
    from .extraction.engines.model_load import ModelSource
    from .extraction.reference import Reference

    return Reference(ModelSource(model=check.model, revision=check.revision, trust_remote_code=check.trust_remote_code))


def _measure(found: _Found, sample: StoredSample, reference: Reference) -> None:
    from .extraction.compare import COMPARED_ROWS, expected_name, measure

    exact, rounded = reference.compute(sample.input_ids.tolist())
    found.measured += measure(sample.key, sample.states, exact, rounded)
    wanted = exact.named()
    for state, stored in sample.states.items():
        found.stored[sample.key, state] = stored[:COMPARED_ROWS].clone()
        found.wanted[sample.key, state] = wanted[expected_name(state)][:COMPARED_ROWS].clone()
    right = reference.lm_head.likeliest(exact.final)
    found.num_rows += len(right)
    found.num_same += int((reference.lm_head.likeliest(sample.states[FINAL]) == right).sum())
    if rounded is not None:
        same = int((reference.lm_head.likeliest(rounded.final) == right).sum())
        found.num_same_own = (found.num_same_own or 0) + same


def _check_next_token(found: _Found, listed: Listed, sample: StoredSample, head: LmHead) -> None:
    if listed.next_token == NO_NEXT_TOKEN:
        return
    verdict = head.judge(listed.next_token, sample.last_final)
    found.num_next_tokens += 1
    found.num_next_agree += verdict.is_level
    if not verdict.is_level:
        found.faults.append(
            f"{listed.key}: the engine's next token is {verdict.token}, but the LM head makes {verdict.likeliest} of "
            f"the last row of `final`, which puts the engine's in place {verdict.rank + 1}: "
            "`final` is not the LM head's input, or its rows are not this sample's"
        )


def _verified(  # noqa: PLR0913, PLR0917 - the one place where all that was found comes together
    path: Path, check: ModelCheck, facts: ModelFacts, reference: str, chosen: Sequence[Listed], found: _Found
) -> Verified:
    from .extraction.compare import judge, other_sample_errors

    keys = [sample.key for sample in chosen]
    others = {
        (key, state): other_sample_errors(rows, {other: found.wanted[other, state] for other in keys if other != key})
        for (key, state), rows in found.stored.items()
    }
    readings, faults = judge(found.measured, others)
    manifest = DatasetFolder(path).manifest
    return Verified(
        manifest_sha256=manifest_sha256(manifest) if manifest.is_file() else "",
        checked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        eaglehs_version=__version__,
        model=published_model(facts).name,
        revision=facts.revision,
        reference=reference,
        seed=check.seed,
        max_tokens=check.max_tokens,
        samples=tuple(keys),
        num_rows=found.num_rows,
        states=readings,
        num_next_tokens=found.num_next_tokens,
        num_next_agree=found.num_next_agree,
        same_token_share=found.num_same / found.num_rows,
        own_same_token_share=None if found.num_same_own is None else found.num_same_own / found.num_rows,
        faults=(*faults, *found.faults),
    )
