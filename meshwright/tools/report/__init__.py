"""Reports of plans: one page that needs nothing else, and traces for Perfetto."""
