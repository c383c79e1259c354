"""The block as one: only what enters it is held, and all of it runs again within its backward."""

from meshwright.forms.retaining import NOTHING
from meshwright.forms.retention import Retention

RETENTION = Retention(unit="block", describe=lambda dtype: NOTHING, offered=False)
