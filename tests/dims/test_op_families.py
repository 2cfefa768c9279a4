"""The law of families: a table that knows one name of an operation knows all of its names."""

from __future__ import annotations

import pytest
import torch

from ringopt.dims import contraction, contraction_rules, follow, op_families, origin, products, rules, undone_views
from ringopt.frontend import functionalize
from ringopt.recognize import lift_pointwise, lift_views, softmax
from ringopt.sharding.handlers import joins, moe_routing, registry

FAMILIES = {name: tuple(names) for name, names in vars(op_families).items() if name.isupper()}
ONE_OPERATION = [name for name in FAMILIES if name not in ("ELEMENTWISE", "SYNONYMS")]  # these are many operations

TABLES = {
    "dims.rules": {*rules.RULES, *rules.POINTWISE},
    "dims.contraction": contraction.MAKERS,
    "dims.contraction_rules": contraction_rules.PRODUCTS,
    "dims.products": products.FACTORS,
    "dims.follow": follow.ALONG,
    "dims.origin": origin.KEEPING,
    "dims.undone_views": undone_views.RULES,
    "frontend.functionalize": functionalize.MANY,
    "recognize.lift": {*lift_views.VIEWS, *lift_pointwise.RULES, *lift_pointwise.POINTWISE},
    "recognize.softmax.VIEWS": softmax.VIEWS,
    "recognize.softmax.CONVERSIONS": softmax.CONVERSIONS,
    "sharding.joins": joins.SAME_ENTRIES,
    "sharding.moe_routing": moe_routing.SAME_NUMBERS,
    "sharding.registry": registry.HANDLERS,
}

# Names of a family that a table has alone, and why the others do not belong there.
ALONE = {
    ("dims.undone_views", "slice"),  # narrow is made a slice before (functionalize.part_by_part)
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("family", ONE_OPERATION)
def test_a_table_knows_all_names_of_a_family_or_none(family, table):
    known = {name for name in FAMILIES[family] if name in TABLES[table] and (table, name) not in ALONE}
    assert known in (set(), set(FAMILIES[family]))


@pytest.mark.parametrize("table", TABLES)
def test_no_table_knows_a_name_that_was_renamed(table):
    assert not op_families.SYNONYMS.keys() & set(TABLES[table])


@pytest.mark.parametrize("name", sorted({name for names in FAMILIES.values() for name in names}))
def test_names_are_those_of_operators(name):
    assert hasattr(torch.ops.aten, name)
