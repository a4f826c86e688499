"""Which steps of a program become branches of its graph."""

import random

from torch_hlo.compiler.gpu.branches import LIMIT, Branches, Span
from torch_hlo.hlo.ir.dim import symbol


def test_a_chain_is_one_branch():
    branches = Branches()
    assert [branches.place([Span(0, i, i + 1)], [Span(0, i + 1, i + 2)]) for i in range(5)] == [
        (0, ())
    ] * 5


def test_independent_steps_part_and_meet():
    branches = Branches()
    assert branches.place([Span(4, 0, 8)], [Span(0, 0, 8)]) == (0, ())
    assert branches.place([Span(5, 0, 8)], [Span(0, 8, 16)]) == (1, ())
    assert branches.place([Span(0, 0, 16)], [Span(0, 16, 24)]) == (1, (0,))
    # of the other branch all is known
    assert branches.place([Span(0, 16, 24)], [Span(0, 24, 32)]) == (1, ())


def test_memory_that_is_used_again_counts():
    branches = Branches()
    branches.place([], [Span(0, 0, 8)])
    branches.place([Span(0, 0, 8)], [Span(6, 0, 8)])
    # after the reader, whose memory it takes
    assert branches.place([Span(4, 0, 8)], [Span(0, 4, 12)]) == (0, ())


def test_unknown_sizes_mean_everything_behind_the_word():
    branches = Branches()
    n = symbol("n")
    branches.place([], [Span(0, n, 2 * n)])
    assert branches.place([], [Span(0, 0, 4)])[0] == 0
    assert branches.place([], [Span(1, 0, n)])[0] == 1


def test_every_dependency_is_kept():
    """Random steps: what a step needs is at an earlier place of its branch, or waited for, directly
    or through others."""
    rng = random.Random(0)
    for _ in range(60):
        branches, after, steps, ends = Branches(), [], [], {}
        for step in range(40):
            reads, writes = (
                [
                    Span(
                        rng.randrange(3),
                        a := rng.randrange(12),
                        a + rng.randrange(1, 6),
                    )
                    for _ in range(rng.randrange(3))
                ]
                for _ in range(2)
            )
            branch, waits = branches.place(reads, writes)
            before = set()
            for b in (branch, *waits):
                if b in ends:
                    before |= {ends[b], *after[ends[b]]}
            after.append(before)
            for earlier, (r, w) in enumerate(steps):
                if any(
                    x.word == y.word and x.overlaps(y)
                    for x, y in [
                        *((a, b) for a in [*reads, *writes] for b in w),
                        *((a, b) for a in writes for b in r),
                    ]
                ):
                    assert earlier in before, f"step {step} must come after {earlier}"
            steps.append((reads, writes))
            ends[branch] = step
        assert branches.count <= LIMIT
