"""What every part shares, as plain data: graph, cluster, layouts, schedules and the plan."""
