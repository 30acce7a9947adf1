"""What the ledger keeps in memory: any record comes back as it was put in, at less than half of its bytes."""

import sys
import tracemalloc

from eaglehs.schemas.ledger import LedgerEntry, SampleStatus
from eaglehs.schemas.ledger_entries import LedgerEntries
from eaglehs.schemas.sample import DumpRef
from hypothesis import given
from hypothesis import strategies as st

HASHES = st.one_of(st.binary(min_size=16, max_size=16).map(bytes.hex), st.text(max_size=34))
NUMBERS = st.integers(-(2**70), 2**70)
DUMPS = st.builds(DumpRef, name=st.text(max_size=60), size_bytes=NUMBERS, xxh3_128=HASHES)
ENTRIES = st.builds(
    LedgerEntry,
    key=st.text(min_size=1, max_size=9),
    id=st.text(max_size=9),
    num_tokens=NUMBERS,
    status=st.sampled_from(SampleStatus),
    attempt=NUMBERS,
    reason=st.text(max_size=20),
    next_token=st.integers(-1, 2**31),
    dumps=st.lists(DUMPS, max_size=3).map(tuple),
    state_norms=st.dictionaries(st.text(max_size=9), st.floats(allow_nan=False), max_size=4),
    shard=st.text(max_size=30),
    finished_at=st.floats(allow_nan=False),
)


@given(st.lists(ENTRIES, max_size=8))
def test_any_entries_come_back_as_they_were(entries):
    plain = {entry.key: entry for entry in entries}
    kept = LedgerEntries()
    for entry in entries:
        kept[entry.key] = entry
    assert kept == plain
    assert list(kept) == list(plain)
    assert [list(entry.state_norms) for entry in kept.values()] == [list(e.state_norms) for e in plain.values()]
    for key in plain:
        del kept[key]
    assert len(kept) == 0


def test_a_finished_sample_takes_less_than_450_bytes():
    def entry(number: int) -> LedgerEntry:
        key = f"p{number:06d}"
        dump = DumpRef(
            name=f"eh-0123abcd-{key}-100.000000-001730.pt", size_bytes=10**8 + number, xxh3_128=f"{number:032x}"
        )
        return LedgerEntry(
            key=key,
            id=key,
            num_tokens=1730,
            status=SampleStatus.DONE,
            attempt=100,
            dumps=(dump,),
            state_norms=dict.fromkeys(("layer_2", "layer_30", "layer_58", "final"), number + 0.5),
            shard=f"data/train-{number // 20:05d}.tar",
            finished_at=1.7e9 + number,
        )

    tracemalloc.start()
    try:
        kept = LedgerEntries()
        for number in range(1000):
            kept[entry(number).key] = entry(number)
        taken = tracemalloc.get_traced_memory()[0] / 1000
    finally:
        tracemalloc.stop()
    assert taken < 450
    assert sys.getsizeof(kept["p000001"]) > 0
