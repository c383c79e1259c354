"""DeAR, WFBP and MG-WFBP: published rows, and bucket sizes that are tuned."""
