"""Tags of operators, for compilers that read them."""

import torch

# Messages are posted and waited for on the host, and the ranks compare their calls there: a CUDA graph, which replays
# what the device did, would hold none of it. Inductor parts its graphs before and behind such operators.
ON_HOST = (torch.Tag.cudagraph_unsafe,)
