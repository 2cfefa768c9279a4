"""Reports and diffs as HTML: each page one file that opens without a network, in dark and in light."""
