import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_ray.tree import ROOT, Tree


def test_without_a_width_all_are_below_the_head():
    tree = Tree(0)
    assert [tree.add(str(n)) for n in range(20)] == [ROOT] * 20


def test_it_grows_breadth_first():
    tree = Tree(2)
    assert [tree.add(n) for n in "abcdefg"] == [ROOT, ROOT, "a", "a", "b", "b", "c"]
    assert [tree.depth(n) for n in "abcdefg"] == [1, 1, 2, 2, 2, 2, 3]


def test_children_of_one_that_goes_are_taken_in_by_others():
    tree = Tree(2)
    for node in "abcdefg":
        tree.add(node)
    assert tree.remove("a") == ["c", "d"]
    assert tree.above("c") == ROOT
    assert tree.above("d") in {"b", "c"}
    assert tree.remove("a") == []


def test_adding_twice_changes_nothing():
    tree = Tree(1)
    tree.add("a")
    tree.add("b")
    assert tree.add("a") == ROOT
    with pytest.raises(KeyError):
        tree.above("c")


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=60))
def test_whatever_comes_and_goes_it_is_a_tree_of_that_width(width, steps):
    tree, there = Tree(width), set()
    for comes, number in steps:
        node = f"n{number}"
        if comes:
            tree.add(node)
            there.add(node)
        else:
            orphans = tree.remove(node)
            there.discard(node)
            assert set(orphans) <= there
        above = {node: tree.above(node) for node in there}
        assert all(parent == ROOT or parent in there for parent in above.values())
        assert all(list(above.values()).count(parent) <= width for parent in above.values())
        assert all(1 <= tree.depth(node) <= len(there) for node in there)
