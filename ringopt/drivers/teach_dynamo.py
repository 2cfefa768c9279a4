"""All that Dynamo is taught, by whatever has programs traced: the backend, and explain and plan, which run nothing."""

from __future__ import annotations

from functools import cache

from ringopt.drivers.without_graph import warn_of_frames_without_graph
from ringopt.frontend.data_sizes.traced_again import takes_sizes, teach_sizes
from ringopt.frontend.higher_order.associative_scan import teach_associative_scan
from ringopt.frontend.libraries.recurrent import teach_recurrent_layers
from ringopt.frontend.libraries.teach import teach_libraries
from ringopt.frontend.libraries.torch_nn import teach
from ringopt.frontend.loops.rolled import teach_loops
from ringopt.torch_compat.dynamo_logging import log_while_tracing, warn_while_tracing
from ringopt.torch_compat.dynamo_random import know_what_no_draw_reaches
from ringopt.torch_compat.dynamo_views import hold_values_of_ordered_dicts


@cache
def teach_dynamo() -> None:
    """For all that is traced in this process from here on."""
    teach()
    teach_associative_scan()
    teach_libraries()
    teach_recurrent_layers(takes_sizes)
    teach_sizes()
    teach_loops()
    warn_of_frames_without_graph()
    log_while_tracing()
    warn_while_tracing()
    know_what_no_draw_reaches()
    hold_values_of_ordered_dicts()
