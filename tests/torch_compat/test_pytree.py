"""Trees of values."""

from __future__ import annotations

from ringopt.torch_compat.pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

TREE = {"a": [1, 2.0], "b": (3, {"c": None})}


def test_a_tree_is_its_leaves_and_a_form() -> None:
    leaves, spec = tree_flatten(TREE)
    assert leaves == tree_leaves(TREE) == [1, 2.0, 3, None]
    assert tree_unflatten(leaves, spec) == TREE


def test_leaves_are_mapped() -> None:
    assert tree_map(str, TREE) == {"a": ["1", "2.0"], "b": ("3", {"c": "None"})}
    assert tree_map_only(int, lambda x: -x, TREE) == {"a": [-1, 2.0], "b": (-3, {"c": None})}
