"""Not held: the op runs again before the backward of its block.

For all ops of a block it is more than `full`, which needs not hold what they read.
"""

from meshwright.forms.retaining import NOTHING
from meshwright.forms.retention import Retention

RETENTION = Retention(describe=lambda dtype: NOTHING, offered=False)
