"""`extract --push`: finished shards go to the Hub while the run goes on, and the whole is made visible at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cards.licenses import CardTerms
from .packing_keeper import PackingKeeper
from .schemas.counts import counted
from .schemas.errors import EaglehsError, UsageError
from .schemas.manifest import DatasetFolder
from .schemas.progress import Progress

if TYPE_CHECKING:
    from .builder.hub_client import HubClient
    from .builder.publish import PublishResult
    from .builder.publish_plan import PublishSettings
    from .builder.publish_stream import ShardStream


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Where the shards go, and on which terms."""

    repo: str
    private: bool = False
    license: str = ""
    """Empty: the card that is there names one."""

    license_name: str = ""
    deletes: bool = False
    """Delete a shard here once the Hub lists it by its SHA-256."""

    pause_s: float = 60.0
    """Until a Hub that failed is tried again."""

    @property
    def terms(self) -> CardTerms:
        """What the card says of terms."""
        return CardTerms(license=self.license, license_name=self.license_name)

    @property
    def publish(self) -> PublishSettings:
        """What `eaglehs push` takes."""
        from .builder.publish_plan import PublishSettings

        return PublishSettings(private=self.private)


class Push:
    """One push beside one extraction."""

    def __init__(self, options: PushOptions, folder: DatasetFolder, hub: HubClient, progress: Progress) -> None:
        """Use `open_push`."""
        from .builder.publish_stream import ShardStream, StreamSettings

        settings = StreamSettings(publish=options.publish, deletes=options.deletes, pause_s=options.pause_s)
        self._options = options
        self._folder = folder
        self._hub = hub
        self._progress = progress
        self.stream: ShardStream = ShardStream(hub, settings, folder, progress)

    def finish(self) -> PublishResult:
        """Make the whole dataset visible; its manifest, index and card are written. Every shard is sent by now, or is.

        Raises:
            UsageError: the branch has files of an earlier layout.
            HubError: the Hub refused or failed; the same command goes on.
        """
        from .builder.publish import publish
        from .builder.publish_plan import plan_publish
        from .cards.validate import validate_card

        validate_card(self._folder.root)
        plan = plan_publish(self._folder.root, self._hub, self._options.publish, self._progress)
        if plan.stale:
            raise UsageError(
                f"{counted(len(plan.stale), 'file')} of an earlier layout are on the Hub, such as {plan.stale[0]}",
                why="Stock readers would mix them in; all shards are sent, and nothing is visible yet",
                mend=f"Make it visible and remove them with: eaglehs push {self._folder.root} {self._hub.repo} --yes",
            )
        return publish(plan, self._hub, self._options.publish, self._progress)


def check_options(options: PushOptions, folder: DatasetFolder) -> None:
    """Refuse a push that would be refused at the end, before anything is computed.

    Raises:
        UsageError: no name of a repository; no license, or none that the Hub knows.
    """
    from .builder.hub_address import check_repo_name
    from .cards.licenses import merge_terms
    from .cards.write import kept_terms

    check_repo_name(options.repo)
    if not merge_terms(kept_terms(folder), options.terms).get("license"):
        raise UsageError(
            "--push needs --license",
            why="States carry the terms of the model and of the prompts; those who find the dataset must know them",
            mend="Give --license, such as apache-2.0, cc-by-4.0, or other with --license-name",
        )


@contextmanager
def open_push(
    options: PushOptions, packing: PackingKeeper, progress: Progress, hub: HubClient | None = None
) -> Iterator[Push]:
    """Begin to send what is finished, and whatever `packing` finishes from now on; `hub` is the user's unless given.

    Raises:
        UsageError: no license, another dataset is there, or another process publishes this one.
        HubError: no rights, or the Hub does not answer.
    """
    from .builder.hub_client import HubClient
    from .builder.publish_lock import publishing

    check_options(options, packing.folder)
    with publishing(packing.folder.root, holds_pack_lock=True):
        push = Push(options, packing.folder, hub or HubClient(options.repo, progress=progress), progress)
        push.stream.open(packing.whole, packing.shard_names)
        packing.sealed = push.stream.add
        try:
            yield push
        except EaglehsError:
            if push.stream.fault is not None:
                progress.note(f"the push stood still: {push.stream.fault}")
            raise
        finally:
            packing.sealed = None
            push.stream.drop()
