"""Who the ranks are and how tensors move between them."""
