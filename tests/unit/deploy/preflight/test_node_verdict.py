"""What is decided about nodes from what they report, without a node."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sparserow.deploy.preflight.node_table import node_table, node_values
from sparserow.deploy.preflight.node_verdict import (
    Exchange,
    NodeReport,
    Verdict,
    decide,
    final,
    next_ring,
    pairings,
)

PROBLEM = "timed out"


def report(index: int, exchanges: dict[int, float | None], matrices: float = 1.0, disk: float = 1.0) -> NodeReport:
    made = tuple(Exchange(peer, sec, "" if sec is not None else PROBLEM) for peer, sec in exchanges.items())
    return NodeReport(index, matrices, disk, made)


def ring_of(
    count: int, failed: set[tuple[int, int]] = frozenset(), **seconds: dict[int, float]
) -> dict[int, NodeReport]:
    """Reports of a ring in which these pairs failed."""
    peers: dict[int, dict[int, float | None]] = {index: {} for index in range(count)}
    for pairs in pairings(range(count)):
        for one, other in pairs:
            took = None if (min(one, other), max(one, other)) in (failed or set()) else 1.0
            peers[one][other] = peers[other][one] = took
    matrices, disk = seconds.get("matrices", {}), seconds.get("disk", {})
    return {i: report(i, peers[i], matrices.get(i, 1.0), disk.get(i, 1.0)) for i in range(count)}


def states(verdict: Verdict) -> list[str]:
    return [node.state for node in verdict.nodes]


def names(count: int) -> list[str]:
    return [f"node {index}" for index in range(count)]


@pytest.mark.parametrize("count", range(12))
def test_each_node_has_both_neighbours_and_one_pair_at_a_time(count: int) -> None:
    made = pairings(range(count))
    pairs = [tuple(sorted(pair)) for each in made for pair in each]
    assert len(set(pairs)) == len(pairs) == (0 if count < 2 else 1 if count == 2 else count)
    for each in made:
        nodes = [index for pair in each for index in pair]
        assert len(set(nodes)) == len(nodes), "a node is in one pair at a time"
    if count > 2:
        assert all(sum(index in pair for pair in pairs) == 2 for index in range(count))
        assert len(made) == 2 + count % 2


def test_good_nodes_are_ok() -> None:
    verdict = decide(names(5), ring_of(5), 2.0)
    assert states(verdict) == ["ok"] * 5
    assert (verdict.bad, verdict.sentence()) == ((), "")
    assert next_ring(verdict, 1) is None


@pytest.mark.parametrize("count", range(3, 8))
def test_the_bad_one_of_a_pair_is_known(count: int) -> None:
    for bad in range(count):
        failed = {tuple(sorted((bad, (bad + step) % count))) for step in (1, -1)}
        verdict = decide(names(count), ring_of(count, failed), 2.0)  # type: ignore[arg-type]
        assert verdict.with_state("broken") == (bad,)
        assert f"node {bad} is broken: its exchange with node" in verdict.sentence()
        assert PROBLEM in verdict.sentence()


def test_of_a_broken_link_one_end_goes() -> None:
    verdict = decide(names(4), ring_of(4, {(1, 2)}), 2.0)
    assert verdict.with_state("broken") == (2,)
    assert verdict.sentence() == f"node 2 is broken: its link to node 1 is broken ({PROBLEM})"


def test_of_two_nodes_that_do_not_reach_each_other_both_are_named() -> None:
    verdict = decide(names(2), ring_of(2, {(0, 1)}), 2.0)
    assert states(verdict) == ["unproven"] * 2
    assert next_ring(verdict, 1) is None
    assert states(final(verdict)) == ["broken"] * 2
    assert "node 0 is broken: none of its exchanges succeeded" in final(verdict).sentence()


def test_a_silent_node_is_broken_and_its_only_neighbour_is_not() -> None:
    reports = ring_of(2, {(0, 1)})
    del reports[1]
    verdict = decide(names(2), reports, 2.0)
    assert states(verdict) == ["unproven", "broken"]
    assert next_ring(verdict, 1) is None
    assert states(final(verdict)) == ["ok", "broken"]
    assert final(verdict).sentence() == "node 1 is broken: it did not report in time"


def test_a_node_that_never_came_is_broken() -> None:
    three = ring_of(3)
    assert states(decide(names(4), three, 2.0)) == ["ok", "ok", "ok", "broken"]


def test_a_failure_of_its_own_names_a_node() -> None:
    reports = ring_of(3)
    reports[1] = NodeReport(1, 1.0, None, reports[1].exchanges, ("disk failed (No space left on device)",))
    verdict = decide(names(3), reports, 2.0)
    assert states(verdict) == ["ok", "broken", "ok"]
    assert verdict.sentence() == "node 1 is broken: disk failed (No space left on device)"


@pytest.mark.parametrize("part", ["matrices", "disk"])
def test_a_node_is_slow_by_the_factor_above_the_median(part: str) -> None:
    at_factor = decide(names(5), ring_of(5, **{part: {3: 2.0}}), 2.0)
    assert states(at_factor) == ["ok"] * 5
    beyond = decide(names(5), ring_of(5, **{part: {3: 2.5}}), 2.0)
    assert states(beyond) == ["ok", "ok", "ok", "slow", "ok"]
    assert beyond.sentence() == f"node 3 is slow: {part} took 2.5 s, 2.5 times the median of 1 s"
    assert decide(names(5), ring_of(5, **{part: {3: 2.5}}), 3.0).bad == ()


def test_one_of_two_nodes_can_be_slow() -> None:
    assert states(decide(names(2), ring_of(2, matrices={0: 9.0}), 2.0)) == ["slow", "ok"]


def test_small_differences_of_a_disk_are_noise() -> None:
    disk = dict.fromkeys(range(4), 0.01)
    assert decide(names(4), ring_of(4, disk={**disk, 2: 0.9}), 2.0).bad == ()
    assert decide(names(4), ring_of(4, disk={**disk, 2: 1.1}), 2.0).bad == (2,)


def test_a_slow_exchange_names_the_node_and_not_its_neighbours() -> None:
    """Both sides of a pair take long; each neighbour has another side that does not."""
    reports = ring_of(5)
    for index in (1, 2, 3):
        times = {each.peer: 9.0 if 2 in (index, each.peer) else 1.0 for each in reports[index].exchanges}
        reports[index] = report(index, times)  # type: ignore[arg-type]
    assert decide(names(5), reports, 2.0).with_state("slow") == (2,)


def test_a_broken_node_does_not_move_the_median() -> None:
    reports = ring_of(4, matrices={0: 1.0, 1: 1.0, 2: 3.0, 3: 100.0})
    del reports[3]
    assert states(decide(names(4), reports, 2.0))[2] == "slow"


def test_a_node_between_two_broken_ones_gets_another_chance() -> None:
    verdict = decide(names(6), ring_of(6, {(0, 1), (1, 2), (2, 3), (3, 4)}), 2.0)
    assert states(verdict) == ["ok", "broken", "unproven", "broken", "ok", "ok"]
    ring = next_ring(verdict, 1)
    assert ring is not None
    assert set(ring) == {0, 2, 4, 5}
    assert next_ring(verdict, 3) is None


def found(count: int, bad: set[int], links: set[tuple[int, int]]) -> tuple[Verdict, list[list[int]]]:
    """The verdict on a network in which no exchange of a bad node, and none on a bad link, succeeds."""
    reports: dict[int, NodeReport] = {}
    ring: list[int] | None = list(range(count))
    rings = []
    while ring is not None:
        rings.append(ring)
        for index in ring:
            peers = [pair[1 - pair.index(index)] for each in pairings(ring) for pair in each if index in pair]
            fails = {peer: bool({index, peer} & bad) or tuple(sorted((index, peer))) in links for peer in peers}
            made = report(index, {peer: None if failed else 1.0 for peer, failed in fails.items()})
            reports[index] = reports[index].joined(made) if index in reports else made
        verdict = decide(names(count), reports, 2.0)
        ring = next_ring(verdict, len(rings))
    return final(verdict), rings


@pytest.mark.parametrize("seed", range(300))
def test_every_bad_node_is_named_and_no_good_one_that_met_a_good_one(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(2, 12)
    bad = set(draw.sample(range(count), draw.randrange(0, count)))
    verdict, rings = found(count, bad, set())
    assert len(rings) <= 3
    named = set(verdict.with_state("broken"))
    assert named >= bad, (count, bad, rings)
    good = set(range(count)) - bad
    meets = any({one, other} <= good for ring in rings for each in pairings(ring) for one, other in each)
    if meets and len(rings) < 3:
        assert named == bad, (count, bad, rings)
    assert verdict.with_state("unproven") == ()


@pytest.mark.parametrize("seed", range(100))
def test_what_is_left_has_no_link_that_was_seen_to_be_broken(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(3, 12)
    around = [*pairwise(range(count)), (0, count - 1)]
    links = set(draw.sample(around, draw.randrange(1, len(around))))
    verdict, rings = found(count, set(), links)
    left = {node.index for node in verdict.nodes if node.state == "ok"}
    tried = {tuple(sorted(pair)) for ring in rings for each in pairings(ring) for pair in each}
    assert [link for link in links & tried if set(link) <= left] == []  # type: ignore[arg-type, operator]
    if len(links) == 1 and count > 3:
        assert len(left) == count - 1


def test_good_nodes_whose_neighbours_are_all_bad_meet_in_another_ring() -> None:
    verdict, rings = found(4, {1, 3}, set())
    assert rings == [[0, 1, 2, 3], [0, 2, 1, 3]]
    assert states(verdict) == ["ok", "broken", "ok", "broken"]


def test_where_nothing_succeeds_every_node_is_named() -> None:
    for count in range(2, 7):
        assert states(found(count, set(range(count)), set())[0]) == ["broken"] * count


def test_two_good_nodes_between_silent_ones_meet_in_another_ring() -> None:
    reports = ring_of(4, {(0, 1), (1, 2), (2, 3), (0, 3)})
    del reports[1], reports[3]
    verdict = decide(names(4), reports, 2.0)
    assert states(verdict) == ["unproven", "broken", "unproven", "broken"]
    assert next_ring(verdict, 1) == [0, 2]


def test_reports_and_verdicts_travel_as_json() -> None:
    reports = ring_of(3, {(0, 1), (1, 2)})
    verdict = decide(names(3), reports, 2.0)
    values = node_values(verdict)
    assert values["bad"] == [1]
    assert Verdict.of({"nodes": values["nodes"]}) == verdict
    assert node_table(verdict).row_count == 3
