"""The arena: memory is lent once at a time, and comes back when nothing refers to it."""

import gc
import pickle
import threading
from itertools import pairwise

import torch
from eaglehs.builder.arena import Arena
from hypothesis import given
from hypothesis import strategies as st

PAGE = 4096


def test_what_is_let_go_is_lent_again():
    arena = Arena(4 * PAGE)
    first, second = arena.take(2 * PAGE), arena.take(2 * PAGE)
    assert arena.take(1) is None
    address = first.data_ptr()
    del first
    assert arena.take(PAGE).data_ptr() == address
    assert second.data_ptr() == address + 2 * PAGE


def test_a_view_of_a_view_keeps_its_block():
    arena = Arena(PAGE)
    view = torch.frombuffer(arena.take(100).numpy().data, dtype=torch.int32, count=4, offset=64)[1:3]
    gc.collect()
    assert arena.take(1) is None
    assert len(pickle.dumps(view)) < 1000  # 16 bytes and not the arena
    del view
    assert arena.lent_bytes == 0
    assert arena.take(1) is not None


def test_a_return_from_another_thread_wakes_the_reader():
    arena = Arena(PAGE)
    held = [arena.take(1)]
    threading.Timer(0.05, held.clear).start()
    arena.wake.get(timeout=60)
    assert arena.take(1) is not None


@given(st.lists(st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 5)), max_size=40))
def test_no_two_blocks_ever_overlap(steps):
    arena = Arena(16 * PAGE)
    held: list[torch.Tensor] = []
    for number, (size, drop) in enumerate(steps):
        block = arena.take(size)
        if block is not None:
            held.append(block.fill_(number % 251))
        marks = [int(block[0]) for block in held]
        for mark, kept in zip(marks, held, strict=True):
            assert bool((kept == mark).all())
        places = sorted((kept.data_ptr(), kept.data_ptr() + len(kept)) for kept in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        block = None
        if held:
            del held[drop % len(held)]
    kept = None
    held.clear()
    assert arena.lent_bytes == 0
