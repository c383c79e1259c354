"""Whether the plan that search finds is the fastest of those that run."""
