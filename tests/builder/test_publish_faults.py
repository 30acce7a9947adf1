"""Whatever breaks a push: no half dataset shows, the same call ends it, and nothing that the Hub had is sent again."""

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from eaglehs.builder.hub_errors import HubConflictError, HubError
from eaglehs.builder.publish import publish
from eaglehs.schemas.errors import StorageError
from eaglehs.schemas.progress import Silent

from tests.factories.datasets import SyntheticDataset
from tests.factories.published import (
    BATCHED,
    REPO,
    TOKENS,
    Pusher,
    assert_not_visible,
    assert_whole,
    by_lfs,
    make_publishable,
)
from tests.fakes.hub import HubServer, start_hub

SEEDS = range(30)
WAIT = time.sleep
PLACES = (
    "/_lfs/put/",
    "/_lfs/verify",
    "/lfs/objects/batch",
    "/preupload/",
    "/commit/eaglehs-upload-main",
    "/commit/main",
    "/repos/create",
    "/branch/",
    "/tree/",
    "/paths-info/",
    "/api/validate-yaml",
    "/api/whoami-v2",
    "/auth-check/",
)


@pytest.fixture(autouse=True)
def lfs():
    with by_lfs():
        yield


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """The client library has waits of its own, 23 seconds in all."""
    wait = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: wait(min(seconds, 0.005)))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> SyntheticDataset:
    return make_publishable(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def hub(tmp_path: Path):
    hub = start_hub(tmp_path / "hub", TOKENS)
    yield hub
    hub.stop()


def random_fault(rng: random.Random) -> dict:
    """Return one fault: somewhere, after some requests, for a moment or for longer than one waits."""
    path = rng.choice(PLACES)
    fault = {"path": path, "skip": rng.randrange(4), "times": rng.choice([1, 1, 2, 5, 40])}
    kinds = [{"status": 429, "headers": {"Retry-After": "0"}}, {"status": 503}, {"status": 500}, {"status": 403}]
    # A lost answer to the bytes themselves makes the client library send them again by itself; elsewhere it must not.
    kinds.append({"after": rng.randrange(1, 9_000)} if path == "/_lfs/put/" else {"status": 504, "late": True})
    return fault | rng.choice(kinds)


def plain_push(pusher: Pusher, rng: random.Random) -> None:
    pusher.push()


def killed_push(pusher: Pusher, rng: random.Random) -> None:
    """Push in a process that SIGKILL ends at some request."""
    last = len(pusher.hub.log) + rng.randrange(1, 40)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            pusher.push()
        os._exit(0)
    while len(pusher.hub.log) < last:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            break  # it ended before
        WAIT(0.001)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pusher.hub.wait_until_idle()  # what was under way ends, as it will
    raise StorageError("killed")


def push_with_a_wrong_hash(pusher: Pusher, rng: random.Random) -> None:
    """Push while the Hub lists another SHA-256 for a shard than that of its bytes."""
    pusher.hub.state.forged[f"data/train-0000{rng.randrange(4)}.tar"] = "e" * 64
    try:
        pusher.push()
    finally:
        pusher.hub.state.forged.clear()


def push_beside_another(pusher: Pusher, rng: random.Random) -> None:
    """Push by a plan that another publisher of the same dataset has made untrue, wholly or in part."""
    plan = pusher.plan()
    pusher.hub.faults += [{"path": "/_lfs/put/|/commit/", "skip": rng.randrange(8), "status": 403}]
    with suppress(StorageError):
        pusher.push()
    publish(plan, pusher.client, BATCHED, Silent())


FIRST_PUSHES = (plain_push, killed_push, push_with_a_wrong_hash, push_beside_another, plain_push)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_push_through_faults_ends_whole_with_nothing_sent_twice(hub: HubServer, dataset: SyntheticDataset, seed: int):
    rng, pusher = random.Random(seed), Pusher(hub, dataset.root)
    hub.faults += [random_fault(rng) for _ in range(rng.choice([1, 2, 3]))]
    for attempt in range(4):
        if attempt == 3:
            hub.faults.clear()  # a fault that stays is over at last
        try:
            (plain_push if attempt else FIRST_PUSHES[seed % len(FIRST_PUSHES)])(pusher, rng)
            break
        except StorageError:
            repo = hub.state.load("datasets", REPO)
            if repo and "data/train-00000.tar" in hub.files(REPO):
                assert_whole(hub, dataset)  # made visible, and what came after failed
            else:
                assert_not_visible(hub)
    hub.faults.clear()
    pusher.push()
    assert_whole(hub, dataset)
    assert set(hub.refs(REPO)) == {"main"}
    assert {sha: count for sha, count in Counter(hub.finished_puts()).items() if count > 1} == {}


def test_a_refusal_in_the_middle_keeps_what_was_sent(hub, dataset):
    hub.faults.append(
        {"path": "/_lfs/put/", "skip": 3, "times": 99, "status": 403, "message": "over the storage limit"}
    )
    pusher = Pusher(hub, dataset.root)
    with pytest.raises(HubError, match=r"sending data/train-0000.*403.*write rights in org, and room") as refusal:
        pusher.push()
    assert refusal.value.exit_code == 4
    assert_not_visible(hub)
    before = hub.finished_puts()
    assert len(before) == 3
    hub.faults.clear()
    pusher.push()
    assert_whole(hub, dataset)
    assert len(hub.finished_puts()) == len(set(hub.finished_puts())) == 5  # four shards and the index


def test_a_commit_whose_answer_is_lost_is_not_made_again(hub, dataset):
    for branch in ("main", "eaglehs-upload-main"):
        hub.faults.append({"path": f"/commit/{branch}$", "status": 504, "late": True})
    Pusher(hub, dataset.root).push()
    assert_whole(hub, dataset)
    assert sum(seen["path"].endswith("/commit/main") for seen in hub.log) == 1


def test_retry_after_is_waited_for(hub, dataset, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    hub.faults.append({"path": "/commit/main", "status": 429, "headers": {"Retry-After": "17"}})
    Pusher(hub, dataset.root).push()
    assert 17 in waited


def test_a_server_that_asks_to_wait_for_hours_is_left_with_what_to_do(hub, dataset):
    hub.faults.append({"path": "/commit/main", "status": 429, "headers": {"Retry-After": "7200"}})
    with pytest.raises(HubError, match=r"429.*Wait for the rate limit; the same command goes on"):
        Pusher(hub, dataset.root).push()


def test_of_two_publishers_of_different_datasets_one_is_told_to_start_again(hub, dataset, tmp_path):
    other = make_publishable(tmp_path / "other", lengths=(3, 44, 9))
    first, second = Pusher(hub, dataset.root), Pusher(hub, other.root)
    first.push()
    stale_plan = second.plan()
    third = make_publishable(tmp_path / "third", lengths=(8, 31, 2))
    Pusher(hub, third.root).push()
    with pytest.raises(HubConflictError, match="changed by somebody else"):
        publish(stale_plan, second.client, BATCHED, Silent())
    assert_whole(hub, third)
    second.push()
    assert_whole(hub, other)


def test_of_two_publishers_of_one_dataset_the_later_finds_it_done(hub, dataset):
    first, second = Pusher(hub, dataset.root), Pusher(hub, dataset.root)
    plan = second.plan()
    first.push()
    result = publish(plan, second.client, BATCHED, Silent())
    assert result.revision == hub.refs(REPO)["main"]
    assert_whole(hub, dataset)
    assert len(hub.finished_puts()) == len(set(hub.finished_puts()))


def test_two_publishers_that_begin_a_repository_do_not_mix_their_shards(hub, dataset, tmp_path):
    other = make_publishable(tmp_path / "other", lengths=(3,))
    small = Pusher(hub, other.root)
    plan = small.plan()
    Pusher(hub, dataset.root).push()
    with pytest.raises(HubConflictError, match=r"was empty when the push began and has data/train-00001.tar now"):
        publish(plan, small.client, BATCHED, Silent())
    assert_whole(hub, dataset)
