"""Trees of lists, tuples and dicts, by their leaves: the module that torch itself uses, and programs register with."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

# tree_flatten(tree): (leaves, spec); tree_unflatten(leaves, spec): the tree; tree_leaves(tree): the leaves alone.
# tree_map(function, tree), tree_map_only(type, function, tree): a tree of the same form.
