"""What every part shares: the graph, the cluster, layouts, schedules and the plan, all plain data."""
