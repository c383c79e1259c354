"""What the exit code of a training job tells whoever started it: come again, or do not."""

RETRY = 75
"""What sysexits.h calls EX_TEMPFAIL: the job was asked to leave, or lost what it ran on, and has
saved what it has done. Started again as it was, it goes on."""
STOP = 70
"""EX_SOFTWARE: it failed twice at one step with one error, or nothing that is left can run it.
Started again as it was, it would fail again."""
