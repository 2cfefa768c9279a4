"""One adapter a kernel: what it supports, forward with LSE, backward with the LSE of whole rows."""
