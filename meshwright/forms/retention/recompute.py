"""Not held: the op runs again before the backward of its block.

For all ops of a block it is more than `recompute=full`, which needs not hold what they read.
"""

from meshwright.forms.retention import Retention

RETENTION = Retention(again=True, offered=False)
